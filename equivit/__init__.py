"""equivit: equivariant and efficient vision transformers in JAX and Flax.  Imports nothing; see README.md.

train, evaluate, convert, summarize, sweep, export, profile and accelerate are the commands, `python -m equivit.<name>`;
testing has public checks of symmetry.

    symmetry/     groups and their action on images, grids and fields; circular shifts (mathematics, no Flax)
    layers/       shared by backbones: dense, isotypic, invariants, Jumbo, positions, blocks, stacks of blocks, readouts
    logical.py    parameters by the names that papers give them; what is declared of each
    precision.py  which parameters a run rounds to bfloat16
    models/       a folder for each backbone, with layers of its own; the zoo merges the names of all
    objectives/   what is minimised: classification, distillation, masked autoencoding, DINOv2, segmentation
    data/         sources, transforms, batches, loader; an example is a dict
    training/     program, step, loop, sweeps, optimisers on logical tensors, sharding, checkpoints, config
    evaluation/   protocols, one per file; figures; Sigma of attention, and fits of the taps that replace it
    acceleration/ the stages of accelerate
    pretrained/   official formats, one per file

Imports run one way: symmetry, kernels, layers, models, then objectives, evaluation and pretrained, training, commands.
"""

__version__ = "0.1.0"
