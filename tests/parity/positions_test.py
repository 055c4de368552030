"""Tables of positions for images of another size, by DINOv2's two rules and that of MAE and DeiT, from 37 x 37."""

import jax.numpy as jnp
import pytest

from equivit.layers.position import resize
from equivit.pretrained import dinov2
from tests.parity.arrays import Comparison, files, load

PATCH = 14
RULES = {"noreg": dinov2.resizing(registers=0), "reg": dinov2.resizing(registers=4)}


@pytest.mark.parametrize("path", files("losses", "pos_embed_interp.npz"), ids=lambda path: path.stem)
def test_positions_of_other_sizes(path, record_property):
    data = load(path)
    comparison = Comparison(data)
    token, table = data["input/pos_embed"][0, :1], data["input/pos_embed"][0, 1:].reshape(37, 37, -1)
    for key in [key for key in data if key.startswith("output/") and "size" not in key]:
        rule, pixels = key.removeprefix("output/").split("_")
        rows, columns = (int(side) // PATCH for side in pixels.split("x"))
        fields = RULES[rule]
        ours = resize(table, (rows, columns), antialias=fields["position_antialias"], offset=fields["position_offset"])
        comparison.array(key, jnp.concatenate([token, ours.reshape(rows * columns, -1)])[None])
    ours = resize(table, (24, 24))
    comparison.array("output/size_noaa_24", ours.reshape(1, 24 * 24, -1))
    comparison.finish(record_property, "positions")
