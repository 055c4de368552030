"""The savings from removing 75 % of the patches: a step of masked autoencoding, beside one that encodes all.

    python -m experiments benchmarks.masked_autoencoding --entry=gpu  # a GPU: ViT-B, bfloat16
    python -m experiments benchmarks.masked_autoencoding --size=s16 --batch=8 --runs=5 --warmup=1  # a CPU: float32

Both steps have the same objective, decoder and optimizer; in the second the encoder takes the removed patches, too.
Jumbo quotes 2.8 to 4.1 times from MAE, for larger encoders with a lighter decoder.  Claim: a step is faster.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import costs
from equivit.configs import mae as recipe
from equivit.models.decoders import MaskedAutoencoderConfig
from equivit.models.vit.names import SIZES
from equivit.objectives.mae import Mae
from equivit.training import build
from experiments import compiled_models, findings, flags, machine, timing
from experiments.findings import Claim

PAPER = (2.8, 4.1)
ENCODERS = ("plain", "jumbo")
DEPTHS = (8, 1)  # blocks of the decoder: the usual one, and the lightest possible
COLUMNS = dict(encoder="encoder", decoder_depth="decoder blocks", kept="patches", all="all", masked_ms="masked, ms")
COLUMNS |= dict(all_ms="all, ms", speed_up="times", macs="by products", masked_mib="masked, MiB", all_mib="all, MiB")


class EncodesAll(Mae):
    """The same loss on the same removed patches, but the encoder sees all of them."""

    def prepare(self, module, batch, key):
        batch = super().prepare(module, batch, key)
        return {**batch, "keep": jnp.broadcast_to(jnp.arange(batch["mask"].shape[-1]), batch["mask"].shape)}


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=50, warmup=10)
    parser.add_argument("--size", default="b16", choices=list(SIZES), help="of the encoder (%(default)s)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--pixels", type=int, default=224)
    options = parser.parse_args(arguments)
    about = dict(size=options.size, batch=options.batch, pixels=options.pixels, runs=options.runs, paper=PAPER)
    entry = findings.Entry(options, about, timing.Budget(options.minutes))
    entry.keep(("encoder", "decoder_depth"), itertools.product(ENCODERS, DEPTHS))
    rows = entry.measured(functools.partial(measured, options=options), COLUMNS)
    print(f"{options.size}, {options.batch} images of {options.pixels}x{options.pixels}; paper, larger: {PAPER}")
    print(findings.table(rows, COLUMNS))
    text = "{encoder}, {decoder_depth} decoder blocks: speed-up of the step"
    claims = [Claim(text.format(**row), row["speed_up"], at_least=1.0) for row in rows]
    return entry.finish(claims)


def measured(encoder: str, depth: int, options) -> dict:
    """Both steps of configs/mae.py in turn, and the ratio of multiply-adds of their forward passes."""
    config, pixels = recipe.get_config(f"B,{encoder}"), (options.pixels, options.pixels)
    config.batch_size, config.precision = options.batch, "mixed" if machine.on_gpu() else "float32"
    config.model.update(name=config.model.name.replace("b16", options.size), image_size=pixels)
    config.data.image_size, config.objective.decoder_depth = pixels, depth
    objectives = {"masked": None, "all": EncodesAll(config)}
    steps = {name: compiled_models.training_step(config, objective) for name, objective in objectives.items()}
    calls = {name: program.start() for name, program in steps.items()}
    milliseconds = timing.milliseconds(calls, options)
    macs, (kept, every) = forward_macs(config)
    memory = {f"{name}_mib": program.memory and program.memory.peak / 2**20 for name, program in steps.items()}
    times = {f"{name}_ms": time for name, time in milliseconds.items()}
    row = dict(encoder=encoder, decoder_depth=depth, kept=kept, all=every, **times)
    return row | dict(speed_up=times["all_ms"] / times["masked_ms"], macs=macs[1] / macs[0], **memory)


def forward_macs(config) -> tuple[list[int], tuple[int, int]]:
    """Multiply-adds of a forward pass of one image with kept and with all patches, and both numbers of patches."""
    encoder = jax.eval_shape(lambda: build.make_model(config, nnx.Rngs(0))).config
    section = config.objective
    whole = MaskedAutoencoderConfig(encoder, section.decoder_width, section.decoder_depth, section.decoder_heads)
    model = jax.eval_shape(lambda: whole.build(nnx.Rngs(0)))
    image = jax.ShapeDtypeStruct((1, *config.data.image_size, 3), jnp.float32)
    every = (encoder.image_size[0] // encoder.patch_size[0]) * (encoder.image_size[1] // encoder.patch_size[1])
    numbers = (every // 4, every)
    keeps = [jax.ShapeDtypeStruct((1, number), jnp.int32) for number in numbers]
    return [costs.count(lambda m, x, keep: m(x, keep), model, image, keep).macs for keep in keeps], numbers
