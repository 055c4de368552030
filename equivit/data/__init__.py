"""Sources, transforms of single examples, batches, and the loader that combines them."""
