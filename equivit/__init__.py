"""equivit: vision transformers with symmetry and speed, in JAX.  Imports nothing; see README.md."""

__version__ = "0.1.0"
