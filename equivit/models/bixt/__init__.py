"""BiXT: the model, and attention between latents and tokens."""
