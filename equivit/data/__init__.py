"""Sources, per-image transforms, whole-batch mixing, and the loader that joins them."""
