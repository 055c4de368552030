"""What is minimised: one objective per file, all subclasses of `objective.Objective`."""
