"""CvT: the model, and attention of which convolutions make queries, keys and values."""
