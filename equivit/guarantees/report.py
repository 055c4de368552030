"""The report on a model's symmetries: symmetry.json, and report.md with pictures."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from equivit import files
from equivit.guarantees.measured import Stability
from equivit.guarantees.motions import SYMMETRIES
from equivit.guarantees.proof import Break, Proof

HOLDS = {"yes": "holds", "in part": "holds without quarter turns, as the model takes no images with swapped sides"}


class Report(NamedTuple):
    """The symmetries of a model.

    Attributes:
      proofs: in float64, then at the precision of the model.
      measured: on images, or None.
      seen: the proof on some of these images, or None.
      turned: whether quarter turns are among the motions; some models do not take images with swapped sides.
    """

    model: str
    proofs: tuple[Proof, ...]
    measured: Stability | None
    seen: Proof | None
    turned: bool

    def holds(self, symmetry: str) -> str:
        """Whether a symmetry holds: "yes", "no", or "in part" for a group whose quarter turns were left out."""
        if self.broken(symmetry) is not None:
            return "no"
        return "yes" if self.turned or symmetry != "octic" else "in part"

    def broken(self, symmetry: str) -> Break | None:
        """Where a symmetry breaks first, at the highest precision that shows it; None if it holds."""
        return next((at for proof in self.proofs if (at := proof.broken(symmetry)) is not None), None)


def lines(report: Report) -> list[str]:
    """A line for each symmetry: whether it holds, the largest deviations, and where it breaks first."""
    found = []
    for symmetry in SYMMETRIES:
        worst = ", ".join(f"{_worst(proof, symmetry):.1e} in {proof.precision}" for proof in report.proofs)
        at = report.broken(symmetry)
        if at is None:
            verdict = HOLDS[report.holds(symmetry)]
        else:
            verdict = f"breaks first at {at.stage} ({at.motion}: {at.deviation:.1e})"
        found.append(f"{symmetry:6} {verdict}; largest deviation {worst}")
    if report.measured is not None:
        for name, change in report.measured.groups.items():
            found.append(f"{name:8} {_kept(report.measured)} in {1 - change.changed:.1%}, cosine {change.cosine:.4f}")
    return found


def write(folder: pathlib.Path, report: Report) -> pathlib.Path:
    """Write symmetry.json and report.md, and return the path of report.md.  The pictures are `pictures`'."""
    files.write_text(folder / "symmetry.json", json.dumps(_object(report), indent=1) + "\n")
    files.write_text(folder / "report.md", _page(report))
    return folder / "report.md"


def _object(report: Report) -> dict[str, Any]:
    """The content of symmetry.json; None for numbers that are not finite."""
    symmetries = {}
    for symmetry in SYMMETRIES:
        at = report.broken(symmetry)
        broken = None if at is None else dataclasses.asdict(at) | dict(deviation=_finite(at.deviation))
        symmetries[symmetry] = dict(holds=report.holds(symmetry), broken=broken)
    found: dict[str, Any] = dict(model=report.model, symmetries=symmetries)
    found["proofs"] = [_numbers(proof) for proof in report.proofs]
    if report.measured is not None:
        parts = report.measured._asdict()
        for key in ("motions", "groups", "angles"):
            parts[key] = {name: change._asdict() for name, change in parts[key].items()}
        found["measured"] = parts
    if report.seen is not None:
        found["features_of_images"] = _numbers(report.seen)
    return found


def _numbers(proof: Proof) -> dict[str, Any]:
    return dict(
        precision=proof.precision,
        image_size=list(proof.size),
        bound=proof.bound,
        stages=[stage.name for stage in proof.stages],
        fields=[None if stage.group is None else stage.group.name for stage in proof.stages],
        deviations={
            motion.name: [_finite(x) for x in row]
            for motion, row in zip(proof.motions, proof.deviations.tolist(), strict=True)
        },
        correlations={m.name: row for m, row in zip(proof.motions, proof.correlations.tolist(), strict=True)},
    )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _page(report: Report) -> str:
    """The text of report.md."""
    height, width = report.proofs[0].size
    parts = [
        f"# Symmetries of {report.model}",
        f"Random images of {height}x{width} pixels. A deviation is the largest difference between the features of the "
        "moved image and the moved features, relative to their largest entry.",
        _table(("symmetry", "holds", *(f"in {p.precision}" for p in report.proofs), "breaks first at"), _rows(report)),
        "## By block",
        "![Deviation by block](deviations.png)",
        _by_stage(report),
        "![Features of moved images](features.png)",
        "*Features of moved copies of one image, moved back, as colours (principal components of the upright ones): "
        "rows are equal where the model is symmetric.*",
        "## By motion",
        _by_motion(report.proofs),
        *([] if report.measured is None else _on_images(report.measured)),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(report: Report) -> list[tuple[str, ...]]:
    rows = []
    for symmetry in SYMMETRIES:
        at = report.broken(symmetry)
        worst = (f"{_worst(proof, symmetry):.1e}" for proof in report.proofs)
        where = "" if at is None else f"{at.stage}, {at.motion}, {at.precision}"
        rows.append((symmetry, report.holds(symmetry), *worst, where))
    return rows


def _by_stage(report: Report) -> str:
    """The largest deviation and the mean correlation of every stage."""
    header = ["stage", "tokens"]
    columns = []
    for symmetry in ("octic", "shift"):
        for proof in report.proofs:
            header.append(f"{symmetry}, {proof.precision}")
            columns.append([f"{x:.1e}" for x in proof.deviations[proof.rows(symmetry)].max(0)])
        for proof, inputs in ((report.proofs[0], "random"), (report.seen, "images")):
            if proof is not None:
                header.append(f"{symmetry}, correlation on {inputs}")
                columns.append([f"{x:.3f}" for x in proof.correlations[proof.moving(symmetry)].mean(0)])
    stages = [(s.name, "dense" if s.group is None else f"{s.group.name} field") for s in report.proofs[0].stages]
    return _table(header, [(*stage, *row) for stage, row in zip(stages, zip(*columns, strict=True), strict=True)])


def _by_motion(proofs: Sequence[Proof]) -> str:
    """The largest deviation of every motion and its stage."""
    header, columns = ["motion"], []
    for proof in proofs:
        header += [f"{proof.precision}", "at"]
        columns.append([f"{x:.1e}" for x in proof.deviations.max(1)])
        columns.append([proof.stages[k].name for k in proof.deviations.argmax(1)])
    names = [motion.name for motion in proofs[0].motions]
    return _table(header, list(zip(names, *columns, strict=True)))


def _on_images(measured: Stability) -> list[str]:
    what = "predictions" if measured.by_class else "nearest images"
    rows = [(name, f"{c.changed:.1%}", f"{c.cosine:.4f}") for name, c in measured.groups.items()]
    each = [(name, f"{c.changed:.1%}", f"{c.cosine:.4f}") for name, c in measured.motions.items()]
    return [
        f"## On {measured.images} images",
        _table(("motion", f"{what} that change", "cosine of the output"), rows + each),
        "![Changes over angles](angles.png)",
        "*Turns by any angle, antialiased, of the disc inside the image.*",
    ]


def _kept(measured: Stability) -> str:
    return "the same class" if measured.by_class else "nearest to itself"


def _worst(proof: Proof, symmetry: str) -> float:
    return float(proof.deviations[proof.rows(symmetry)].max())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    parts = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in parts)
