"""SHViT: the model, single-head attention, and merging between stages."""
