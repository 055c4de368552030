"""CvT: the model, and attention with convolved queries, keys and values."""
