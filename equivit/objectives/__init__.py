"""Losses: one objective per file, all subclasses of `objective.Objective`."""
