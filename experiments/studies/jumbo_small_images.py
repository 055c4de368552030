r"""Plain, registers and Jumbo ViTs of three widths on CIFAR-10 at equal epochs: does Jumbo's gain grow as width falls?

    python -m experiments studies.jumbo_small_images --source=npz:/data/cifar10.npz --epochs=5
    python -m experiments studies.jumbo_small_images --source=npz:/data/cifar10.npz --epochs=5 --widths=96 \
        --models=octic,steerable,invariant --entry=octic

It does in the paper, on ImageNet-1K (Table 6, 224 px, Jumbo over registers: +13.0 points at width 128, +3.9 at 192,
+0.8 at 384).  Here: 32 px in patches of 8, three blocks, and a Jumbo token of J = 6, or a class token and 5 registers.
The second command compares H8 models: without a Jumbo token, with a steerable one, and with an invariant one.
"""

from experiments import findings, flags
from experiments.studies import differences, several_seeds

HEADS = {"64": 2, "96": 3, "128": 4, "192": 3}  # by width, as in Pico, Nano and Tiny
REFERENCES = {"jumbo": ("plain", "registers"), "registers": ("plain",)}
REFERENCES |= {"steerable": ("octic",), "invariant": ("octic", "steerable")}
MODELS = {
    "plain": ["model.name=vit_ti16", "model.family=plain"],
    "registers": ["model.name=register_vit_ti16", "model.family=plain", "model.registers=5"],
    "jumbo": ["model.name=jumbo_vit_ti16", "model.family=plain"],
    "octic": ["model.name=octic_vit_ti16", "model.family=H8"],
    "steerable": ["model.name=octic_jumbo_vit_ti16", "model.family=H8", "model.field=steerable"],
    "invariant": ["model.name=octic_jumbo_vit_ti16", "model.family=H8", "model.field=invariant"],
}
SHAPE = ["model.depth=3", "model.patch_size=8", "model.layer_scale=0.1", "evaluation.suite=('accuracy',)"]
ACCURACY = "eval/accuracy/top1"


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--models", default=["plain", "registers", "jumbo"], type=flags.one_of(list(MODELS)))
    parser.add_argument("--widths", default=["96", "128", "192"], type=flags.one_of(list(HEADS)))
    options = several_seeds.parse(parser, arguments)
    rows = {}
    for width in options.widths:
        size = [f"model.width={width}", f"model.num_heads={HEADS[width]}", *SHAPE]
        for model in options.models:
            overrides = [*size, *MODELS[model], *several_seeds.SMALL, *several_seeds.CIFAR10]
            found = several_seeds.aggregate(options, "configs/cifar.py:10,plain", overrides, f"{model}_{width}")
            rows[f"{model} {width}"] = found
    gains = gains_of(rows)
    shown = {name: {"top1": row[ACCURACY]["values"]} for name, row in rows.items()}
    several_seeds.show(shown, dict(top1="top-1, %"), gains)
    findings.write(options, dict(data="cifar10", **several_seeds.settings(options), rows=rows, gains=gains))
    return 0


def gains_of(rows) -> dict[str, dict]:
    """The difference of each model to those it is compared with, at each width, and its standard error."""
    gains = {}
    for name in rows:
        model, width = name.split()
        for other in REFERENCES.get(model, ()):
            if (reference := rows.get(f"{other} {width}")) is not None:
                values = (row[ACCURACY]["values"] for row in (rows[name], reference))
                gains[f"{model} - {other}, {width}"] = differences.difference(*values)
    return gains
