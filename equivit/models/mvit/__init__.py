"""MViTv2: the model, its stages, pooling attention, and relative positions."""
