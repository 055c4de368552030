"""The losses of DINOv2 and its head against the official code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.objectives import dino_losses
from equivit.pretrained import dinov2
from tests.objectives import dino_definitions
from tests.parity.arrays import Comparison, files, load

FILES = {path.stem: path for path in files("losses")}


def needs(name):
    return pytest.mark.skipif(name not in FILES, reason=f"EQUIVIT_PARITY has no losses/{name}.npz")


def value_and_grad(function, *arguments):
    return jax.jit(jax.value_and_grad(function, argnums=tuple(range(len(arguments)))))(*arguments)


NAMES = [f"mlp.{2 * i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
NAMES += ["last_layer.weight_v", "last_layer.weight_g"]


def head(data, prefix):
    """The head whose tensors are stored as `<prefix>mlp_0_weight` ... `<prefix>last_layer_weight_v`."""
    return dinov2.load_head({name: data[prefix + name.replace(".", "_")] for name in NAMES})


def compare_head(comparison, prefix, gradient):
    """Gradients of a head, stored in the official layout."""
    for name, array in dinov2.head_state(gradient).items():
        comparison.array(prefix + name.replace(".", "_"), array)


def test_class_tokens(record_property):
    data = load(FILES["dino_cls"])
    logits, center = data["input/teacher_logits"], data["input/center"][0]
    temperature = data["input/teacher_temp"]
    targets = {
        "sk": dino_definitions.sinkhorn_knopp(jnp.asarray(logits).reshape(-1, 48), temperature).reshape(logits.shape),
        "centering": dino_definitions.centred_targets(jnp.asarray(logits), center, temperature),
    }
    comparison = Comparison(data)
    moved = dino_definitions.moved_center(center, jnp.asarray(logits), momentum=data["input/center_momentum"])
    comparison.array("output/new_center", moved[None])

    def total(crops, local, targets):
        parts = dino_definitions.dino(targets, crops, local, data["input/student_temp"])
        return sum(parts), parts

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    student = (data["input/student_global_logits"], data["input/student_local_logits"])
    for kind, rows in targets.items():
        comparison.array(f"output/{kind}_teacher_probs", rows)
        (_, parts), gradients = run(*student, rows)
        for name, loss, gradient in zip(("global", "local"), parts, gradients, strict=True):
            comparison.array(f"output/{kind}_loss_{name}", loss)
            comparison.array(f"output/{kind}_grad_student_{name}", gradient)
        (_, unswapped), _ = run(*student, rows[::-1])  # each view against its own target
        assert abs(unswapped[0] - data[f"output/{kind}_loss_global"]) > 1e-2
    comparison.finish(record_property, "dino losses")


@needs("ibot_patch")
def test_masked_patches(record_property):
    data = load(FILES["ibot_patch"])
    masks, temperature = data["input/masks"].astype(bool), data["input/teacher_temp"]
    chosen, weights = dino_losses.masked_rows(jnp.asarray(masks)[:, None], capacity=70)
    logits, student = (np.zeros((70, 48), np.float32) for _ in range(2))
    logits[:58], student[:58] = data["input/teacher_patch_logits"], data["input/student_patch_logits"]
    logits[58:], student[58:] = 30, -30  # padding
    np.testing.assert_array_equal(chosen[0, :58], data["input/mask_indices"])
    weights = weights[0]
    assert not weights[58:].any()

    comparison = Comparison(data)
    comparison.array("output/masks_weight", weights[:58])
    momentum, center = data["input/center_momentum"], data["input/center"][0, 0]
    comparison.array("output/new_center", dino_definitions.moved_center(center, logits, weights, momentum)[None, None])
    targets = {
        "sk": dino_definitions.sinkhorn_knopp(jnp.asarray(logits), temperature, weights),
        "centering": dino_definitions.centred_targets(jnp.asarray(logits), center, temperature),
    }
    for kind, rows in targets.items():
        comparison.array(f"output/{kind}_teacher_probs", rows[:58])
        value, (gradient,) = value_and_grad(
            lambda s, rows=rows: dino_definitions.ibot(rows, s, weights, len(masks), data["input/student_temp"]),
            student,
        )
        comparison.array(f"output/{kind}_loss", value)
        comparison.array(f"output/{kind}_grad_student", gradient[:58])
        assert not gradient[58:].any()
    comparison.finish(record_property, "dino losses")


def test_koleo(record_property):
    data = load(FILES["koleo"])
    views = data["input/student_cls"]
    comparison = Comparison(data)

    def weighted(views):
        losses = jnp.stack([dino_losses.koleo(view) for view in views])
        return data["input/loss_weight"] * losses.sum(), losses

    (value, losses), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(views)
    comparison.array("output/loss_per_view", losses)
    comparison.array("output/weighted_sum", value)
    comparison.array("output/grad_student_cls", gradient)
    comparison.array("output/nn_index", dino_losses.neighbours(dino_losses.unit(views, 1e-8)))
    comparison.finish(record_property, "dino losses")


def test_head(record_property):
    data = load(FILES["dino_head"])
    comparison = Comparison(data)

    @jax.jit
    def run(head, x):
        value, back = jax.vjp(lambda head, x: head(x), head, x)
        return value, back(data["input/cotangent"])

    value, (gradient, x) = run(head(data, "input/param_"), data["input/x"])
    comparison.array("output/y", value)
    comparison.array("output/grad_x", x)
    compare_head(comparison, "output/grad_", gradient)
    comparison.finish(record_property, "dino losses")


@needs("dinov2_total")
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_total(kind, record_property):
    """The whole objective from the tokens of the backbones, its rows in several parts."""
    data = load(FILES["dinov2_total"])
    student, teacher = (
        [head(data, f"input/head_{who}_{name}_") for name in ("dino", "dino" if kind == "shared" else "ibot")]
        for who in ("student", "teacher")
    )
    masks = data["input/masks"].astype(bool).reshape(2, 3, 64)
    seen = {"cls": data["input/teacher_cls"], "patches": data["input/teacher_patch"].reshape(2, 3, 64, 24)}
    tokens = {"cls": data["input/student_cls_global"], "local_cls": data["input/student_cls_local"]}
    tokens["patches"] = data["input/student_patch"].reshape(2, 3, 64, 24)

    def loss(tokens, first, second):
        heads = (first, first if kind == "shared" else second)
        options = dict(teacher_temperature=data["input/teacher_temp"], capacity=80, at_once=24)
        losses = dino_losses.dinov2(heads, tuple(teacher), tokens, seen, masks, **options).losses
        return losses["total"], losses

    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, losses), (gradient, of_head) = run(tokens, *student)
    stored = {key: value for key, value in data.items() if not key.startswith("output") or f"/{kind}_" in key}
    comparison = Comparison(stored)
    names = ("local", "global", "koleo", "ibot", "total")
    comparison.array(f"output/{kind}_losses_local_global_koleo_ibot_total", np.stack([losses[n] for n in names]))
    comparison.array(f"output/{kind}_grad_student_cls_global", gradient["cls"])
    comparison.array(f"output/{kind}_grad_student_cls_local", gradient["local_cls"])
    comparison.array(f"output/{kind}_grad_student_patch", gradient["patches"].reshape(6, 64, 24))
    compare_head(comparison, f"output/{kind}_grad_dino_head_", of_head)
    comparison.finish(record_property, "dino losses")
