"""The stages of `equivit.accelerate`, and its report."""
