"""Swin and SwinV2: the model, its windows, and merging between stages."""
