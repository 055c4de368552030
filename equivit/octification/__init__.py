"""The plan, the starts, the stages and the report of `equivit.octify`."""
