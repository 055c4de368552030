r"""Plain, Registers and Jumbo ViTs of three widths on CIFAR-10 at equal epochs: does Jumbo's gain grow as width falls?

The paper claims it on ImageNet-1K (Table 6, 224 px, Jumbo over Registers: +13.0 points at width 128, +3.9 at 192, +0.8
at 384).  Here: 32 px in patches of 8, three blocks, and as many tokens before the patches everywhere but in the plain
ViT: a Jumbo token of J = 6, or a class token and 5 registers.

    python experiments/jumbo_small_images.py --source=npz:/data/cifar10.npz --epochs=5
    python experiments/jumbo_small_images.py --source=npz:/data/cifar10.npz --epochs=5 --widths=96 \
        --models=octic,steerable,invariant --out=runs/octic_jumbo_small_images.json

The second compares Jumbo tokens among octic patches: an H8 without one, with a wide field, and with one that is
invariant.  Prints a table with the spread over seeds, writes JSON with machine and versions.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import benchmark, small_images

HEADS = {64: 2, 96: 3, 128: 4, 192: 3}  # those of Pico, Nano and Tiny
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
    options = _options(arguments)
    rows = {}
    for width in options.widths:
        size = [f"model.width={width}", f"model.num_heads={HEADS[int(width)]}", *SHAPE]
        for model in options.models:
            overrides = [*size, *MODELS[model], *small_images.SMALL, *small_images.CIFAR10]
            name = f"{model}_{width}"
            rows[f"{model} {width}"] = small_images.run(options, "configs/cifar.py:10,plain", overrides, name)
    gains = gains_of(rows)
    _print(rows, gains)
    small_images.write(options.out, dict(data="cifar10", rows=rows, gains=gains))
    return 0


def _options(arguments):
    parser = small_images.parser(__doc__, "jumbo_small_images")
    parser.add_argument("--models", default=["plain", "registers", "jumbo"], type=benchmark.one_of(list(MODELS)))
    parser.add_argument("--widths", default=["96", "128", "192"], type=benchmark.one_of(list(map(str, HEADS))))
    return parser.parse_args(arguments)


def gains_of(rows) -> dict[str, dict]:
    """The difference of each model to those it is compared with, at each width, and its standard error."""
    gains = {}
    for name in rows:
        model, width = name.split()
        for other in REFERENCES.get(model, ()):
            if (reference := rows.get(f"{other} {width}")) is not None:
                gap, error = small_images.difference(rows[name][ACCURACY]["values"], reference[ACCURACY]["values"])
                gains[f"{model} - {other}, {width}"] = dict(gap=gap, standard_error=error)
    return gains


def _print(rows, gains):
    for name, row in rows.items():
        figure = row[ACCURACY]
        print(f"{name:16} {100 * figure['mean']:6.2f} +- {100 * (figure['spread'] or 0):.2f} % top-1")
    for name, gain in gains.items():
        print(f"{name:28} {small_images.verdict(gain['gap'], gain['standard_error'])}")


if __name__ == "__main__":
    sys.exit(main())
