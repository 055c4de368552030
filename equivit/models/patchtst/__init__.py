"""PatchTST: the model for time series."""
