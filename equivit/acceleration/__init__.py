"""The plan, the stages and the report of `equivit.accelerate`."""
