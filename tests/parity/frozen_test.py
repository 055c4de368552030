"""Evaluations of frozen features against DINOv2's, CAPI's and scikit-learn's, in the stored cases."""

import numpy as np
import pytest
from PIL import Image

from equivit.data import crops
from equivit.evaluation import linear_probe, scores
from equivit.evaluation import patch_segmentation as patches
from equivit.evaluation.neighbours import Search
from equivit.evaluation.protocols import hematology
from equivit.evaluation.protocols.knn import Neighbours
from equivit.symmetry import fields
from tests.parity.arrays import Comparison, files, load

FILES = {path.stem: path for path in files("evaluation", "*.npz")}
ROUNDING = 1e-6  # scores are stored in float32
SEARCH, SOLVED = 2e-5, 1e-3  # the tolerances that the files come with: of float32 products, of L-BFGS in float32


def stored(name):
    return pytest.mark.skipif(name not in FILES, reason=f"EQUIVIT_PARITY has no evaluation/{name}.npz")


class Stored:
    """A file of inputs and outputs; integers are stored as floats."""

    def __init__(self, name):
        self.name, self.data = name, load(FILES[name])
        self.comparison = Comparison(self.data)

    def __call__(self, name):
        return self.data[f"input/{name}"]

    def ints(self, name):
        return self(name).astype(int)

    def compare(self, name, ours, tolerance):
        self.comparison.array(f"output/{name}", ours, tolerance)

    def equal(self, name, ours):
        np.testing.assert_array_equal(self.data[f"output/{name}"], ours)
        self.comparison.left.discard(f"output/{name}")

    def finish(self, record_property, *elsewhere):
        """`elsewhere`: what other outputs follow from."""
        self.comparison.left -= {f"output/{name}" for name in elsewhere}
        self.comparison.finish(record_property, f"evaluation/{self.name}")


@stored("knn_vote")
def test_votes_of_neighbours(record_property):
    file = Stored("knn_vote")
    features, labels, queries = file("features"), file.ints("labels"), file("queries")
    options = dict(num_classes=int(file("num_classes")), temperature=float(file("temperature")))
    (found,) = Neighbours(features, labels, ks=file.ints("ks_all").tolist(), **options).votes(queries)
    file.compare("probas_all", found, SEARCH)
    (fewer,) = Neighbours(features, labels, ks=file.ints("ks_max20").tolist(), **options).votes(queries)
    file.compare("probas_max20", fewer, SEARCH)
    neighbours = Search(features)(queries, 100)
    file.compare("top100_sims", neighbours.scores, SEARCH)
    file.equal("top100_labels", labels[neighbours.rows])
    best = np.argsort(-found, axis=-1, kind="stable")
    file.equal("pred_all", best[..., 0])
    right = best == file.ints("query_labels")[:, None]
    file.compare("top1_all", right[..., 0].mean(1), ROUNDING)
    file.compare("top5_all", right[..., :5].any(-1).mean(1), ROUNDING)
    file.finish(record_property)


@stored("linear_probe")
def test_linear_probe(record_property):
    file = Stored("linear_probe")
    initial = {k[6:-8]: v.T for k, v in file.data.items() if k.endswith("_weight0")}
    batches = list(zip(file("class_tokens"), file("patch_tokens")[:, -1], file.ints("labels"), strict=True))
    rates, size = file("base_lrs").tolist(), int(file("global_batch"))
    heads = linear_probe.Heads(6, tuple(float(f"{rate:g}") for rate in rates), batch_size=size, steps=8)
    probe = linear_probe.fit(batches, heads, initial=initial)
    file.compare("losses", probe.losses, SEARCH)
    logits = probe.logits(file("val_class_tokens"), file("val_patch_tokens")[-1])
    for number, name in enumerate(heads.names):
        weight, bias = probe.head(number)
        file.compare(f"{name}_weight", weight.T, SEARCH)
        file.compare(f"{name}_bias", bias, SEARCH)
        file.compare(f"{name}_val_logits", logits[number], SEARCH)
    for of in heads.inputs:
        x = linear_probe.probe_input(file("val_class_tokens"), file("val_patch_tokens")[-1], *of)
        file.compare(f"val_input_{of.name}", x, SEARCH)
    accuracies = (np.asarray(logits).argmax(-1) == file.ints("val_labels")).mean(1)
    file.compare("val_top1", accuracies, ROUNDING)
    file.equal("best_index", accuracies.argmax())
    file.finish(record_property, "lr")  # of which the losses and weights are made


def standardised(file):
    """Train, val and test parts, and the first two in one, as classifiers get them."""
    mean, scale = patches.standardise(file("features_train"))
    parts = {
        name: patches.Part((file(f"features_{name}") - mean) / scale, file.ints(f"labels_{name}"))
        for name in ("train", "val", "test")
    }
    parts["both"] = patches.Part(*(np.concatenate(p) for p in zip(parts["train"], parts["val"], strict=True)))
    return mean, scale, parts


def chosen_and_scored(file, *, num_classes, ignore, **options):
    """The classifier chosen from features that are not standardised, and its scores on the test part."""
    parts = [patches.Part(file(f"features_{name}"), file.ints(f"labels_{name}")) for name in ("train", "val", "test")]
    chosen = patches.choose(*parts[:2], num_classes=num_classes, ignore=ignore, **options)
    features, labels = parts[2]
    return chosen, scores.segmentation(labels, chosen.predict(features), num_classes=num_classes, ignore=ignore)


def compare_scores(file, found, names):
    for name, key in names.items():
        file.compare(key, found[name], ROUNDING)


@stored("seg_knn")
def test_neighbours_of_patches(record_property):
    file = Stored("seg_knn")
    mean, scale, parts = standardised(file)
    file.compare("scaler_mean", mean, SEARCH)
    file.compare("scaler_scale", scale, SEARCH)
    file.compare("standardised_test", parts["test"].features.reshape(80, -1), SEARCH)
    size = int(file("patch_height")), int(file("patch_width"))
    for name in ("train", "test"):
        file.equal(f"majority_{name}", patches.majority(parts[name].labels, size).ravel())
    ks = file.ints("ks").tolist()
    for letter in "ab":
        ignore = file.ints(f"ignore_{letter}").tolist()
        main = file.data["output/majority_train"]
        file.equal(f"kept_train_{letter}", ~np.isin(main, ignore))
        counted = dict(num_classes=6, ignore=ignore)
        validation = patches.knn(*parts["train"], parts["val"].features, ks=ks, ignore=ignore)
        predicted = patches.knn(*parts["both"], parts["test"].features, ks=ks, ignore=ignore)
        for (distance, k), labels in predicted.items():
            setting = f"{letter}_{distance}_k{k}"
            file.equal(f"test_prediction_{setting}", labels)
            found = scores.segmentation(parts["test"].labels, labels, **counted)
            names = {"miou": f"miou_real_classes_{setting}", "miou_official": f"miou_{setting}"}
            compare_scores(file, found, {k: f"test_{v}" for k, v in {**names, "accuracy": f"acc_{setting}"}.items()})
            np.testing.assert_allclose(found["iou"], file.data[f"output/test_iou_per_class_{setting}"], rtol=ROUNDING)
            file.comparison.left.discard(f"output/test_iou_per_class_{setting}")
            held_out = scores.segmentation(parts["val"].labels, validation[distance, k], **counted)
            compare_scores(file, held_out, {"miou_official": f"val_miou_{setting}"})
        chosen, found = chosen_and_scored(file, method="knn", ks=ks, **counted)
        distance, k = chosen.selected
        file.equal(f"selected_k_{letter}", k)
        file.equal(f"selected_is_l2_{letter}", distance == "L2")
        assert found["miou_official"] == pytest.approx(file.data[f"output/test_miou_{letter}_{distance}_k{k}"])
    file.finish(record_property)


@stored("seg_logreg")
def test_linear_classifier_of_patches(record_property):
    file = Stored("seg_logreg")
    *_, parts = standardised(file)
    for letter in "ab":
        ignore = file.ints(f"ignore_{letter}").tolist()
        counted = dict(num_classes=6, ignore=ignore)
        Cs = [float(f"{C:g}") for C in file("Cs")]
        for C in Cs:
            setting = f"{letter}_C{C:g}"
            fitted = patches.linear(*parts["train"], C=C, ignore=ignore)
            file.compare(f"coef_{setting}", fitted.coef, SOLVED)
            file.compare(f"intercept_{setting}", fitted.intercept, SOLVED)
            file.compare(f"objective_{setting}", objective(fitted, parts["train"], C), SEARCH)
            shares = fitted.probabilities(parts["val"].features)
            file.compare(f"val_probas_{setting}", shares.reshape(-1, len(fitted.classes)), SOLVED)
            found = scores.segmentation(parts["val"].labels, fitted.predict(parts["val"].features), **counted)
            compare_scores(file, found, {"miou_official": f"val_miou_{setting}"})
            labels = patches.linear(*parts["both"], C=C, ignore=ignore).predict(parts["test"].features)
            file.equal(f"test_prediction_{setting}", labels)
            found = scores.segmentation(parts["test"].labels, labels, **counted)
            compare_scores(file, found, {"miou_official": f"test_miou_{setting}", "accuracy": f"test_acc_{setting}"})
        file.equal(f"classes_{letter}", fitted.classes)
        chosen, _ = chosen_and_scored(file, method="linear", Cs=Cs, **counted)
        file.equal(f"selected_C_{letter}", np.float32(chosen.selected))
    file.finish(record_property)


def objective(fitted, part, C):
    """sum CE + |W|^2 / (2 C) of the patches that the classifier knows."""
    main = patches.majority(part.labels, patches.patch_size(*part)).ravel()
    kept = np.isin(main, fitted.classes)
    shares = fitted.probabilities(part.features).reshape(len(main), -1)[kept].astype(float)
    right = shares[np.arange(kept.sum()), np.searchsorted(fitted.classes, main[kept])]
    return -np.log(right).sum() + (fitted.coef.astype(float) ** 2).sum() / (2 * C)


@stored("hematology")
def test_cells(record_property):
    file = Stored("hematology")
    labels, test_features, test_labels = file.ints("train_labels"), file("test_features"), file.ints("test_labels")
    classifiers = hematology.Classifiers(file("train_features"), labels)
    for name, predicted in classifiers.predict(test_features).items():
        file.equal(f"{name}_pred", predicted)
        names = {"weighted_f1": "wf1", "accuracy": "acc", "balanced_accuracy": "bacc"}
        scored = hematology.scored(test_labels, predicted)
        compare_scores(file, scored, {key: f"{name}_{stored}" for key, stored in names.items()})
    rows = classifiers.search(test_features, 20).rows
    for k in (1, 20):
        votes = (labels[rows[:, :k], None] == np.arange(8)).sum(1)
        file.equal(f"knn{k}_votes", votes)
    file.compare("linear_coef", classifiers.linear.coef, SOLVED)
    file.compare("linear_intercept", classifiers.linear.intercept, SOLVED)
    file.compare("linear_probas", classifiers.linear.probabilities(test_features), SOLVED)
    file.finish(record_property, "linear_C")


@stored("resize_rotate")
def test_resizing_and_turning(record_property):
    file = Stored("resize_rotate")
    image, size = Image.fromarray(file("image").astype(np.uint8)), int(file("size"))
    labels = Image.fromarray(file("labels").astype(np.int32))
    for filter in ("bicubic", "bilinear", "lanczos"):
        file.equal(f"image_{filter}", np.asarray(crops.resize(image, size, size, filter)))
    larger = image.height + 30, image.width + 19
    file.equal("image_bicubic_up", np.asarray(crops.resize(image, *larger)))
    file.equal("label_nearest", np.asarray(crops.resize(labels, size, size)))
    file.equal("label_nearest_up", np.asarray(crops.resize(labels, *larger)))
    for turns, g in enumerate(("e", "r", "rr", "rrr")):
        file.equal(f"rotated_{90 * turns}", fields.act_on_image(g, file("square")))
    file.finish(record_property)
