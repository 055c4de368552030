"""equivit: equivariant and efficient vision transformers in JAX and Flax.  Imports nothing; see README.md.

Commands, `python -m equivit.<name>`: train, evaluate, convert, summarize, sweep, export, profile and accelerate.
`testing` has public symmetry checks.

    symmetry/     groups and their action on images, grids and fields; circular shifts (mathematics, no Flax)
    layers/       shared by backbones: dense, isotypic, invariants, Jumbo, positions, blocks, stacks of blocks, readouts
    logical.py    parameters by their names in papers, with declared properties
    precision.py  parameters that a run rounds to bfloat16
    models/       one folder per backbone, with its layers; the zoo of all named models
    objectives/   training objectives: classification, distillation, masked autoencoding, DINOv2, segmentation
    data/         sources, transforms, batches, loader; an example is a dict
    training/     program, step, loop, sweeps, optimisers on logical tensors, sharding, checkpoints, config
    evaluation/   protocols, one per file; figures
    acceleration/ the stages of accelerate
    pretrained/   official formats, one per file

Imports run one way: symmetry, kernels, layers, models, then objectives, evaluation and pretrained, training, commands.
"""

__version__ = "0.1.0"
