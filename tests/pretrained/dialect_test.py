"""New formats are short: a dialect of plain ViTs is a spelling, a convolutional net with statistics is one table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import pretrained
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain
from equivit.pretrained.format import Format, require
from equivit.pretrained.mapping import Constant, Pair, Table
from equivit.pretrained.plain import Spelling

# A format like CLIP's image encoder, as a file of its own would have it; but for its norm before the blocks and its
# quick GELU, which our models do not have.
NAME = "clip"
CLIP = Spelling(
    patch_embed="conv1", class_token="class_embedding", position="positional_embedding", registers=None,
    mask_token=None, blocks="transformer.resblocks", norm1="ln_1", qkv="attn.in_proj_{}", proj="attn.out_proj",
    norm2="ln_2", fc=("mlp.c_fc", "mlp.c_proj"), scales=(), norm="ln_post", head=None, batched=False,
)  # fmt: skip


def infer(state, hints):
    fields = plain.fields(state, CLIP, hints)
    return ViTConfig(**fields | dict(num_classes=state.shape("proj", 2)[1]), norm_eps=1e-5), "openai"


def table(config, flavour):
    require(config, NAME, norm_eps=1e-5)
    whole = plain.table(config, CLIP, NAME)
    kept = [pair for pair in whole.pairs if not pair.theirs[0].startswith("conv1.")]
    patches = biasless("conv1.weight", "patch_embed.kernel", "patch_embed.bias", (2, 3, 1, 0))
    return Table([*kept, patches, biasless("proj", "head.weight", "head.bias", (0, 1))])


def biasless(theirs, ours, bias, axes):
    read = lambda x: (x.transpose(axes), np.zeros(x.shape[axes[-1]], np.float32))  # noqa: E731
    return Pair((theirs,), (ours, bias), lambda x, _: x.transpose(np.argsort(axes)), read)  # our bias is zero


def rename(name):
    return name.removeprefix("visual.") if name.startswith("visual.") else f"text.{name}"


FORMAT = Format(NAME, ("openai",), ViTConfig, infer, table, rename=rename, ignored=("^text\\.",))


def random_state(shapes):
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def clip_state():
    width, block = 32, "visual.transformer.resblocks.{}."
    shapes = {"visual.conv1.weight": (width, 3, 8, 8), "visual.class_embedding": (width,)}
    shapes |= {"visual.positional_embedding": (17, width), "visual.proj": (width, 5)}
    shapes |= {f"visual.ln_post.{last}": (width,) for last in ("weight", "bias")}
    for at in (block.format(i) for i in range(2)):
        shapes |= {f"{at}{norm}.{last}": (width,) for norm in ("ln_1", "ln_2") for last in ("weight", "bias")}
        shapes |= {f"{at}attn.in_proj_weight": (3 * width, width), f"{at}attn.in_proj_bias": (3 * width,)}
        for name, n, m in (
            ("attn.out_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes |= {f"{at}{name}.weight": (m, n), f"{at}{name}.bias": (m,)}
    return random_state(shapes)


def test_a_dialect_of_plain_vits(monkeypatch, capsys):
    monkeypatch.setitem(pretrained.FORMATS, NAME, FORMAT)
    state = clip_state()
    text = {"token_embedding.weight": np.ones((7, 4)), "transformer.resblocks.0.ln_1.weight": np.ones(4)}
    model = pretrained.load(NAME, state | text, num_heads=2)
    assert "text.token_embedding.weight, text.transformer.resblocks.0.ln_1.weight" in capsys.readouterr().out
    assert model.config.class_position and model.config.image_size == (32, 32) and model.config.num_classes == 5
    np.testing.assert_array_equal(model.prefix.class_token[...], state["visual.class_embedding"])
    back = pretrained.state_dict(NAME, model)
    assert {f"visual.{name}" for name in back} == state.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, state[f"visual.{name}"], err_msg=name)
    fresh = pretrained.load(NAME, state, num_heads=2, num_classes=3)
    assert "dropped on purpose: proj." in capsys.readouterr().out
    assert fresh(jnp.ones((1, 32, 32, 3))).shape == (1, 3)


# A net of convolutions and batch norms, in the names of timm's MobileNetV4.


@dataclasses.dataclass(frozen=True)
class NetConfig:
    width: int
    depth: int
    num_classes: int

    def build(self, rngs):
        return Net(self, rngs=rngs)


class ConvNorm(nnx.Module):
    def __init__(self, n, m, *, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 3, n, m)))
        self.norm = BatchNorm(m)


class Net(nnx.Module):
    def __init__(self, config, *, rngs):
        self.config, width = config, config.width
        self.stem = ConvNorm(3, width, rngs=rngs)
        self.blocks = nnx.List([ConvNorm(width, width, rngs=rngs) for _ in range(config.depth)])
        self.head = dense.Linear(width, config.num_classes, rngs=rngs)


def net_infer(state, hints):
    return NetConfig(state.out("conv_stem", 4), state.depth("blocks.0"), state.classes("classifier")), "timm"


NET_ROWS = {"stem": "conv_stem", "stem.norm": "bn1", "head": "classifier"}
NET_ROWS |= {"blocks.#": "blocks.0.#.conv", "blocks.#.norm": "blocks.0.#.bn1"}


def net_table(config, flavour):
    return mapping.table(config, NET_ROWS)


NET = Format("net", ("timm",), NetConfig, net_infer, net_table, ignored=(r"\.num_batches_tracked$",))


@pytest.fixture
def net(monkeypatch):
    """The format in place, and a state dict of it."""
    monkeypatch.setitem(pretrained.FORMATS, "net", NET)
    shapes = {"conv_stem.weight": (4, 3, 3, 3), "classifier.weight": (5, 4), "classifier.bias": (5,)}
    shapes |= {f"blocks.0.{i}.conv.weight": (4, 4, 3, 3) for i in range(3)}
    for norm in ("bn1", *(f"blocks.0.{i}.bn1" for i in range(3))):
        shapes |= {f"{norm}.{name}": (4,) for name in ("weight", "bias", "running_mean", "running_var")}
    return random_state(shapes)


def test_a_net_with_statistics(net, capsys):
    counts = {"bn1.num_batches_tracked": np.int64(7), "blocks.0.1.bn1.num_batches_tracked": np.int64(7)}
    model = pretrained.load("net", {f"module.{name}": tensor for name, tensor in (net | counts).items()})
    assert capsys.readouterr().out == f"net: dropped on purpose: {', '.join(counts)}.\n"
    for i in range(3):
        np.testing.assert_array_equal(model.blocks[i].norm.mean[...], net[f"blocks.0.{i}.bn1.running_mean"])
        np.testing.assert_array_equal(model.blocks[i].norm.variance[...], net[f"blocks.0.{i}.bn1.running_var"])
    back = pretrained.state_dict("net", model)
    assert back.keys() == net.keys()
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, net[name], err_msg=name)


def test_missing_statistics_and_idle_hints_are_told(net):
    with pytest.raises(ValueError, match=r"net \(timm; Net, width 4, depth 3\): .* missing: bn1.running_var\.$"):
        pretrained.load("net", {name: tensor for name, tensor in net.items() if name != "bn1.running_var"})
    with pytest.raises(ValueError, match="net: num_heads=2, but its models have none"):
        pretrained.load("net", net, num_heads=2)
    with pytest.raises(ValueError, match="timm: cannot hold a Net"):
        pretrained.state_dict("timm", pretrained.load("net", net))


def test_a_new_head_leaves_statistics_alone(net):
    model = pretrained.load("net", net, num_classes=7)
    assert model.head.weight.shape == (4, 7) and model.config.num_classes == 7
    np.testing.assert_array_equal(model.stem.norm.mean[...], net["bn1.running_mean"])


def test_a_table_that_does_not_cover_the_model_is_told(net, monkeypatch):
    whole = net_table(NetConfig(4, 3, 5), "timm")
    lacking = Table([p for p in whole.pairs if "running_mean" not in p.theirs[0] or "blocks" in p.theirs[0]])
    monkeypatch.setitem(pretrained.FORMATS, "net", dataclasses.replace(NET, table=lambda config, flavour: lacking))
    with pytest.raises(ValueError, match="the format has no such model; no counterpart for stem.norm.mean"):
        pretrained.load("net", net)


def test_parts_of_tables_are_joined():
    one, two = Table(mapping.pairs(["b.scale", "b.bias"], {"b": "a"})), Table([], [Constant("c", np.zeros(1), "zeros")])
    both = one.inside("encoder") + two
    assert [pair.ours for pair in both.pairs] == [("encoder.b.scale",), ("encoder.b.bias",)]
    assert [pair.theirs for pair in both.pairs] == [("a.weight",), ("a.bias",)] and both.constants == [*two.constants]
