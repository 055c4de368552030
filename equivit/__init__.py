"""equivit: equivariant and efficient vision transformers in JAX and Flax.  Imports nothing; see README.md.

Commands, `python -m equivit.<name>` or, once installed, `equivit <name>`: train, evaluate, predict, compare, sweep,
convert, summarize, symmetry, export, profile, accelerate and octify.  `testing` has public symmetry checks.

Imports run one way: symmetry, kernels, layers, models, then objectives, evaluation and pretrained, training, commands.
docs/structure.md describes these rooms.
"""

DISTRIBUTION = "equivit-jax"
__version__ = "0.1.0"
