"""The process and the directory of a run: processes, signals, the lock, checkpoints, resuming."""
