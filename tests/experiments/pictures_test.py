"""The pictures of the README: what is drawn is what their labels say."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers import dense, isotypic
from equivit.symmetry.groups import OCTIC
from experiments import pictures


def test_arrows_turn_and_signs_change_with_the_image(tmp_path):
    embed = isotypic.PatchEmbed((4, 4), 1, 16, group=OCTIC, rngs=nnx.Rngs(0))
    rows = pictures.field_panels(embed, jax.random.normal(jax.random.key(0), (1, 8, 12, 1)))
    turned, mirrored = OCTIC.elements.index("r"), OCTIC.elements.index("m")
    for name, turn, mirror in (("A1", 1, 1), ("A2", 1, -1), ("B1", -1, 1), ("B2", -1, -1)):
        upright = rows[name][0]
        assert upright.shape == (2, 3) and np.abs(upright).max() > 0.01
        np.testing.assert_allclose(rows[name][turned], turn * np.rot90(upright), atol=1e-5)  # float32
        np.testing.assert_allclose(rows[name][mirrored], mirror * upright[:, ::-1], atol=1e-5)
    right, up = rows["E"][0]
    np.testing.assert_allclose(rows["E"][turned], [-np.rot90(up), np.rot90(right)], atol=1e-5)
    np.testing.assert_allclose(rows["E"][mirrored], [-right[:, ::-1], up[:, ::-1]], atol=1e-5)
    pictures.draw_fields(rows, tmp_path / "fields.png")
    assert (tmp_path / "fields.png").is_file()


def test_accuracies_are_in_the_order_of_the_labels(tmp_path):
    each = {g: len(g) / 10 + (g[0] == "m") / 100 for g in reversed(OCTIC.elements)}
    (tmp_path / "evaluation.json").write_text(json.dumps({"orientation": {"accuracy": each}}))
    rows = {"H8": pictures.accuracies(tmp_path)}
    assert rows["H8"] == [each[g] for g in OCTIC.elements]
    pictures.draw_orientation(rows, tmp_path / "orientation.png")
    assert (tmp_path / "orientation.png").is_file()


def test_predictions_stand_where_nothing_was_seen(tmp_path):
    class Zeros(nnx.Module):
        config = SimpleNamespace(encoder=SimpleNamespace(patch_size=(2, 2)))

        def __call__(self, images, keep):
            return jnp.zeros((len(images), 8, 4))

    images = jax.random.normal(jax.random.key(0), (2, 4, 8, 1))
    original, seen, both = pictures.reconstructions(Zeros(), images).values()
    removed = np.isnan(seen)
    assert (np.isnan(dense.patchify(seen, (2, 2))).all(-1).sum(-1) == 6).all()  # of eight patches
    np.testing.assert_array_equal(seen[~removed], original[~removed])
    np.testing.assert_array_equal(both, np.where(removed, 0, original))
    pictures.draw_reconstructions({"image": original, "seen": seen, "both": both}, tmp_path / "reconstructions.png")
    assert (tmp_path / "reconstructions.png").is_file()
