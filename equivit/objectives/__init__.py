"""What is minimised: one objective per file, all with the interface of objective.py."""
