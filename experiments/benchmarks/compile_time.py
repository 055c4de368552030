"""Compile time of a training step against depth: blocks of one kind are one scanned body, so depth should cost nothing.

    python -m experiments benchmarks.compile_time  # about ten minutes on a CPU; at most 20 (--minutes)

The step is the training loop's (LAMB, mixing, averaged weights), of plain and D8 models so narrow that only the
compiler has work.  A time is from Python to the executable, with empty caches: elapsed, and of all processors together.
Sizes are lines of the program before XLA optimises it (StableHLO) and instructions after (HLO).  Claims: 48 blocks take
at most twice the processors' time of 2, and the program before optimisation grows by at most a tenth.  Elapsed times
are not judged: beside other programs they varied threefold.
"""

import itertools
import re
import statistics
import time

import jax

from equivit.training import config as configs
from experiments import compiled_models, findings, flags, timing
from experiments.findings import Claim

DEPTHS = (2, 24, 48)
FAMILIES = {"plain": "vit_ti16", "D8": "octic_vit_ti16"}
REMAT = ("none", "full")
SMALL = dict(width=64, num_heads=2, image_size=(32, 32), patch_size=8, num_classes=10, drop_path=0.1)
TIME, SIZE = 2.0, 1.1  # of the deepest over the shallowest, at most


def main(arguments=None) -> int:
    options = flags.timing_parser(__doc__, __file__, runs=3, warmup=1, minutes=20)
    options.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    options = options.parse_args(arguments)
    budget, rounds = timing.Budget(options.minutes), {}
    variants = list(itertools.product(FAMILIES, REMAT, options.depths))
    entry = findings.Entry(options, dict(runs=options.runs), budget)
    entry.keep(("family", "remat", "depth"), variants)
    for _ in range(options.warmup):  # of Python, not of caches
        compile_once(*variants[0])
    for turn in range(options.runs):
        for variant in variants[:: -1 if turn % 2 else 1]:
            if budget.allows(f"round {turn + 1}, {' '.join(map(str, variant))}"):
                rounds.setdefault(variant, []).append(compile_once(*variant))
                entry.add([summary(*variant, rounds[variant])])
    rows = entry.rows()
    print(findings.table(rows, COLUMNS))
    return entry.finish(claims_of(rows, [*options.depths, *(row["depth"] for row in rows)]))


COLUMNS = dict(family="", remat="remat", depth="blocks", cpu_seconds="s, processors", seconds="s, elapsed")
COLUMNS |= dict(fastest="fastest", slowest="slowest", trace_seconds="tracing", xla_seconds="XLA")
COLUMNS |= dict(lines="StableHLO lines", instructions="HLO instructions")


def compile_once(family: str, remat: str, depth: int) -> dict:
    """Seconds and sizes of the training step of a model, with all caches empty."""
    config = configs.get_base()
    config.model = dict(name=FAMILIES[family], family=family, depth=depth, remat=remat, **SMALL)
    config.batch_size, config.data.image_size = 8, SMALL["image_size"]
    config.objective.update(mixup=0.8, cutmix=1.0, ema=0.999)
    jax.clear_caches()
    start, cpu = time.perf_counter(), time.process_time()
    lowered, _, _ = compiled_models.lower_training_step(config)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done = time.perf_counter()
    return dict(
        seconds=done - start,
        cpu_seconds=time.process_time() - cpu,
        trace_seconds=traced - start,
        xla_seconds=done - traced,
        lines=lowered.as_text().count("\n"),
        instructions=len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", compiled.as_text(), re.MULTILINE)),
    )


def summary(family: str, remat: str, depth: int, rounds: list[dict]) -> dict:
    elapsed = [one["seconds"] for one in rounds]
    medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    row = dict(family=family, remat=remat, depth=depth, rounds=len(rounds), **medians)
    return row | dict(fastest=min(elapsed), slowest=max(elapsed))


def claims_of(rows: list[dict], depths) -> list[Claim]:
    by_variant = {(row["family"], row["remat"], row["depth"]): row for row in rows}
    low, high = min(depths), max(depths)
    claims = []
    for family, remat in itertools.product(FAMILIES, REMAT):
        shallow, deep = (by_variant.get((family, remat, depth), {}) for depth in (low, high))
        for key, word, most in (("cpu_seconds", "processor time", TIME), ("lines", "StableHLO", SIZE)):
            text = f"{family}, remat {remat}: {word} of {high} blocks over {low}"
            claims.append(Claim(text, timing.ratio(deep.get(key), shallow.get(key)), at_most=most))
    return claims
