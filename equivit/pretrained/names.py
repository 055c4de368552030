"""Names of tensors in files: without wrappers from training, and in short form for printing."""

import re
from collections.abc import Iterable

WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module")  # torch.compile, DDP, FSDP
DINOV2_HEADS = (r"^(dino|ibot)_head\.",)  # of self-supervised training
COUNTS = (r"\.num_batches_tracked$",)  # of batch norms


def unwrapped(name: str, wrappers: tuple[str, ...] = WRAPPERS) -> str:
    """`module._orig_mod.norm.weight` -> `norm.weight`."""
    return ".".join(part for part in name.split(".") if part not in wrappers)


def dinov2(name: str) -> str:
    """Also remove the prefix and the chunks of DINOv2's training: `backbone.blocks.1.7.norm1` -> `blocks.7.norm1`.

    A chunk is a run of blocks that FSDP shards together; the second number counts blocks across chunks.
    """
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", unwrapped(name, (*WRAPPERS, "backbone")))


def brief(names: Iterable[str]) -> str:
    """Names in one line: "cls_token.1-4" for a range of final numbers, "blocks.*.mask (12)" for numbers inside."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stem, dot, number = name.rpartition(".")
        if not (dot and number.isdecimal()):
            stem, number = name, ""
        stems.setdefault(stem, []).extend([number] if number else [])
    runs = {stem: f".{n[0]}-{n[-1]}" if len(n) > 1 else "".join(f".{i}" for i in n) for stem, n in stems.items()}
    alike: dict[str, list[str]] = {}
    for stem, run in runs.items():
        alike.setdefault(re.sub(r"\d+", "*", stem) + run, []).append(stem + run)
    return ", ".join(same[0] if len(same) == 1 else f"{pattern} ({len(same)})" for pattern, same in alike.items())
