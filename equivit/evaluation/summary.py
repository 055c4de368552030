"""The results of an evaluation in words, and the end of a run."""

import json
import pathlib

import jax
from flax import nnx

from equivit.evaluation import corrupted

ANGLES = ("", "r", "rr", "rrr")


def rows(results: dict) -> list[tuple[str, str]]:
    """What `suite.evaluate` returned, as (name, value) lines for people."""
    lines = []
    if "accuracy" in results:
        r = results["accuracy"]
        lines.append(("accuracy", f"{_share(r['top1'])} upright, top-5 {_share(r['top5'])} ({r['examples']} images)"))
    if "present_classes" in results:
        r = results["present_classes"]
        lines.append((f"among the {r['classes']} classes present", f"{_share(r['top1'])}, top-5 {_share(r['top5'])}"))
    if "orientation" in results:
        r = results["orientation"]
        each = r["accuracy"]
        lines += [
            ("turned by 0, 90, 180, 270 degrees", "  ".join(_share(each[turn or "e"]) for turn in ANGLES)),
            ("and mirrored", "  ".join(_share(each["m" + turn]) for turn in ANGLES)),
            ("mean of the eight orientations", _share(r["accuracy_mean"])),
            ("randomly rotated", f"{_share(r['rotated'])} ({100 * r['delta']:+.1f} points against upright)"),
            ("prediction the same in all eight", _constancy(r)),
            ("equivariance error of the logits", f"{r['equivariance_error']:.2g} of the largest logit"),
        ]
        if "field_error" in r:
            lines.append(("... of the equivariant blocks", f"{r['field_error']:.2g} of the largest entry"))
    if "sar" in results:
        lines += _sar(results["sar"])
    if "reconstruction" in results:
        r = results["reconstruction"]
        lines.append(
            ("loss of removed patches", f"{r['loss']:.4f}, {_share(r['explained'])} explained ({r['examples']} images)")
        )
    for name in ("corruptions", "corruptions_sar"):
        if name in results:
            lines += _table(results[name])
    return lines


def text(lines: list[tuple[str, str]]) -> str:
    """Lines with aligned columns."""
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def conclude(workdir: pathlib.Path, model: nnx.Module, results: dict) -> str:
    """Write evaluation.json and the two pictures of a finished run, and say how it went and where all of it lies.

    All processes of a run must call it, because the parameters may be spread over them; the first one writes.

    Args:
      workdir: the run directory, with metrics.jsonl.
      model: the trained model.
      results: what `suite.evaluate` returned.
    """
    from equivit.evaluation import figures  # here: matplotlib takes long to import, and only the end of a run draws

    encoder = getattr(model, "encoder", model)  # of a masked autoencoder
    kernels = figures.patch_kernels(encoder) if hasattr(encoder, "patch_embed") else {}
    places = {
        "checkpoints": workdir / "checkpoints",
        "metrics": workdir / "metrics.jsonl",
        "report": workdir / "report.json",
        "all results": workdir / "evaluation.json",
        "learning curves": workdir / "learning_curves.png",
    }
    if kernels:
        places["patch filters"] = workdir / "patch_filters.png"
    if jax.process_index() == 0:
        write(workdir, results)
        figures.learning_curves(places["metrics"], places["learning curves"])
        if kernels:
            figures.patch_filters(kernels, places["patch filters"])
    return text([*rows(results), *((name, str(path)) for name, path in places.items())])


def write(directory: pathlib.Path, results: dict, **about: str) -> pathlib.Path:
    """Write evaluation.json, the results after what `about` says of them; returns its path."""
    path = pathlib.Path(directory) / "evaluation.json"
    path.write_text(json.dumps({**about, **results}, indent=2) + "\n")
    return path


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _sar(result):
    seen = f"{_share(result['kept'])} of the images confident, {result['resets']} resets"
    return [
        ("without adaptation", f"{_share(result['unadapted_top1'])}, top-5 {_share(result['unadapted_top5'])}"),
        ("with SAR", f"{_share(result['top1'])}, top-5 {_share(result['top5'])}; {seen}"),
    ]


def _table(result):
    """Table 2 of Jumbo for each severity."""
    plain = "unadapted_top1" if "unadapted_top1" in result else "top1"
    lines = []
    for severity in result["top1"]:
        lines.append((f"corruptions of severity {severity}, %", corrupted.headings()))
        lines.append(("without adaptation", corrupted.row(result[plain][severity])))
        if plain != "top1":
            lines.append(("with SAR", corrupted.row(result["top1"][severity])))
    return lines


def _constancy(result):
    ties = ", ".join(map(str, result["ties"][:10])) + (", ..." if len(result["ties"]) > 10 else "")
    undecided = f"; {len(result['ties'])} with a tie, by index: {ties}" if ties else "; no ties"
    return f"{result['identical']} of {result['decided']} images{undecided}"
