"""Jumbo, registers and compute-efficient baselines on CIFAR-10, enlarged to 64 px: equal epochs, and equal time.

    python -m experiments studies.jumbo_baselines --source=npz:/data/cifar10.npz --plan
    python -m experiments studies.jumbo_baselines --source=npz:/data/cifar10.npz

10,000 images; models of 9 to 19 million multiply-adds; one untuned learning rate, no distillation.  jumbo and registers
are ViTs of width 64 with four blocks and patches of 8, with a Jumbo token of J = 6, or a class token and 5 registers;
bixt has the same width, depth and patches, and 16 latents; the other models are unchanged.

By one rule every model gets --epochs epochs, by the other the time that jumbo takes for them: the steps that fit, by
step times measured in turn.  The plan is kept in --workdir; with --plan it is printed only.  The paper's comparison is
on ImageNet-1k (Figure 4).
"""

import pathlib
import time
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from ml_collections import ConfigDict

from equivit import summarize
from equivit.training import config as configs
from experiments import compiled_models, findings, flags, timing
from experiments.studies import differences, several_seeds

VIT = dict(width=64, depth=4, num_heads=2, patch_size=(8, 8))
MODELS = {
    "jumbo": dict(name="jumbo_vit_ti16", **VIT),
    "registers": dict(name="register_vit_ti16", registers=5, **VIT),
    "mobilenetv4": dict(name="mobilenetv4_conv_small"),
    "shvit": dict(name="shvit_s1"),
    "efficientvit": dict(name="efficientvit_b0"),
    "bixt": dict(name="bixt_ti_p16", latents=16, **VIT),
}
FIRST = "jumbo"  # whose time all models get
RULES = ("equal epochs", "equal time")
IMAGES = dict(image_size=(64, 64), num_classes=10)
SHARED = ["data.image_size=(64,64)", "data.crop_ratio=1.0", "precision=float32", "objective.label_smoothing=0.0"]
SHARED += ["evaluation.suite=('accuracy',)", "checkpoint.every_seconds=60", *several_seeds.SMALL]
SHARED += [*several_seeds.CIFAR10, *several_seeds.QUIET]
ACCURACY = "eval/accuracy/top1"
ROUNDS = dict(warmup=2, runs=7)
COLUMNS = dict(macs="M multiply-adds", parameters="M parameters", speed="images/s", step="step, ms")
COLUMNS |= {f"{rule}, epochs": f"epochs, {rule}" for rule in RULES}


def main(arguments=None) -> int:
    options = _options(arguments)
    settings = dict(epochs=options.epochs, override=options.override, models={m: MODELS[m] for m in options.models})
    path, keep = options.workdir / "plan.json", not options.plan
    plan = several_seeds.planned(path, settings, lambda: planned(options), keep=keep)
    announce(plan, options)
    if options.plan:
        return 0
    rows = {name: row(name, plan[name], options) for name in options.models}
    gains = gains_of(rows)
    shown = {}
    for name, found in rows.items():
        units = dict(macs=found["macs"] / 1e6, parameters=found["parameters"] / 1e6, step=1e3 * found["step_seconds"])
        shown[name] = found | units
    several_seeds.show(shown, {rule: f"{rule}, %" for rule in RULES}, gains, COLUMNS)
    draw(rows, findings.picture(options))
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], models=MODELS)
    findings.write(options, dict(data="cifar10, 64 px", rows=rows, gains=gains, **settings))
    return 0


def _options(arguments):
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--models", default=list(MODELS), type=flags.one_of(list(MODELS)), help="(all)")
    parser.add_argument("--plan", action="store_true", help="measure, print what would be run, and end")
    parser.set_defaults(epochs=2)
    options = several_seeds.parse(parser, arguments)
    if FIRST not in options.models:
        parser.error(f"--models: {FIRST} must be among them, whose time the others get.")
    return options


def config_of(name: str, options, *, steps: int = 100, seed: int = 0) -> ConfigDict:
    length = several_seeds.length_in_steps(steps, warmup=10)
    texts = [*SHARED, *several_seeds.source(options), *length, f"seed={seed}"]
    config = configs.load("configs/cifar.py:10,plain", texts)
    with config.unlocked():
        config.model = ConfigDict(dict(MODELS[name], **IMAGES))
        for text in options.override:
            configs.override(config, text)
    configs.validate(config)
    return config


def planned(options) -> dict[str, dict[str, Any]]:
    """Costs and times of each model, and its steps by each rule."""
    costs, seconds = {name: measured(name, options) for name in options.models}, times(options)
    equal = round(options.epochs * costs[FIRST]["epoch"])
    plan = {}
    for name, own in seconds.items():
        fitting = max(1, round(equal * seconds[FIRST]["step_seconds"] / own["step_seconds"]))
        plan[name] = costs[name] | own | dict(steps=dict(zip(RULES, (equal, fitting), strict=True)))
    return plan


def measured(name: str, options) -> dict[str, float]:
    """Multiply-adds and parameters, and the steps of an epoch."""
    config = config_of(name, options).unlock()
    config.model.in_channels = 3
    counted, epoch = summarize.counts(config), config.data.train_examples // config.batch_size
    return dict(macs=counted["macs"], parameters=counted["parameters"], epoch=epoch)


def times(options) -> dict[str, dict[str, float]]:
    """Seconds of a training step, and images per second of a forward pass, of all models in turn."""
    steps, forwards = {}, {}
    for name in options.models:
        config = config_of(name, options).unlock()
        config.model.in_channels = 3
        steps[name] = compiled_models.training_step(config).start()
        forward = dict(config.model, batch=config.batch_size, precision="float32", folded=True)
        forwards[name] = compiled_models.forward(**forward).start()
    step, forward = (timing.medians(timing.interleaved(calls, **ROUNDS)) for calls in (steps, forwards))
    return {name: dict(step_seconds=step[name], speed=config.batch_size / forward[name]) for name in steps}


def announce(plan: Mapping[str, Mapping[str, Any]], options) -> None:
    """Print the runs of the plan and their duration."""
    total = 0.0
    for name, one in plan.items():
        for rule, steps in one["steps"].items():
            minutes, epochs = steps * one["step_seconds"] / 60, steps / one["epoch"]
            total += minutes * len(options.seeds) * (rule == RULES[0] or name != FIRST)
            print(f"{name}, {rule}: {steps} steps, {epochs:.1f} epochs, about {minutes:.1f} minutes a seed")
    print(f"about {total:.0f} minutes in all, compiling and evaluation not counted", flush=True)


def row(name: str, one: Mapping[str, Any], options) -> dict[str, Any]:
    """Costs of a model, and its accuracies by rule, one for each seed."""
    found = {key: value for key, value in one.items() if key != "steps"}
    for rule, steps in one["steps"].items():
        found[f"{rule}, epochs"], found[rule] = steps / one["epoch"], []
        if rule == RULES[1] and name == FIRST:
            found[rule] = found[RULES[0]]
            continue
        for seed in options.seeds:
            place = options.workdir / rule.replace(" ", "_") / name / f"seed_{seed}"
            start = time.monotonic()
            accuracy = several_seeds.trained(config_of(name, options, steps=steps, seed=seed), place)[ACCURACY]
            minutes = (time.monotonic() - start) / 60
            print(f"{name}, {rule}, seed {seed}: {100 * accuracy:.2f} % in {minutes:.1f} minutes", flush=True)
            found[rule].append(accuracy)
    return found


def gains_of(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, dict]:
    """The difference of Jumbo to each other model by each rule, and its standard error."""
    return {
        f"{rule}: {FIRST} - {name}": differences.difference(rows[FIRST][rule], rows[name][rule])
        for rule in RULES
        for name in rows
        if name != FIRST
    }


def draw(rows: Mapping[str, Mapping[str, Any]], path: pathlib.Path) -> None:
    """Accuracy over throughput, a panel for each rule; plain ViTs are red, others blue, as in the paper's figures."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    markers = dict(zip(MODELS, "o^sDvP", strict=True))
    for axes, rule in zip(figure.subplots(1, len(RULES), sharey=True), RULES, strict=True):
        for name, found in rows.items():
            color = "tab:red" if name in ("jumbo", "registers") else "tab:blue"
            several_seeds.errorbar(axes, found["speed"], found[rule], color=color, marker=markers[name], label=name)
        axes.set(title=rule, xlabel="images per second, forward", xscale="log")
        axes.xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
