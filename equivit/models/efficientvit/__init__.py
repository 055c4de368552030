"""EfficientViT: the model, linear attention, and separable convolutions."""
