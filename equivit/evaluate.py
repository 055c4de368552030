"""Evaluate a model.

    python -m equivit.evaluate --workdir=runs/quickstart --suite=accuracy,orientation
    python -m equivit.evaluate --model=models/h8_h14 --config=configs/octic_h.py --config.data.source=folder:imagenet

The first command evaluates the newest intact checkpoint of a run; the second a saved model, for example from
`equivit.convert`, on the data of a config.  Results go to the terminal, and to evaluation.json in the directory of the
run or the model.  --config.KEY=VALUE changes keys of the config.

Test sets for models of ImageNet's 1000 classes; append a line to --suite=accuracy:

    ImageNet  --config.data.source=tfds:imagenet2012 --config.data.eval_split=validation
    ReaL      --config.data.source=tfds:imagenet2012_real --config.data.eval_split=validation
    v2        --config.data.source=tfds:imagenet_v2/matched-frequency --config.data.eval_split=test
              (or threshold-0.7, topimages; its own folders: folder:<dir>, --config.data.eval_split=all)
    R         --config.data.source=tfds:imagenet_r --config.data.eval_split=test
              --suite=accuracy,present_classes: among all 1000 classes, and among the 200 in the set
    HR        --config.data.source=folder:<dir>, with the images in <dir>/all/<class>/ and --config.data.eval_split=all

Class folders that lack classes, such as R's, belong next to ImageNet's: <dir>/train/<class>/, <dir>/imagenet-r/<class>/
and --config.data.source=folder:<dir> --config.data.eval_split=imagenet-r.  The released Jumbo models use the whole
shorter side, resized bilinearly: --config.data.image_size=(224,224) --config.data.crop_ratio=1.0
--config.data.interpolation=bilinear.

--suite=corruptions and corruptions_sar apply ImageNet-C's corruptions to the split, with a library (pip install
imagecorruptions-imaug), at severity 5; --config.evaluation.severities=(1,2,3,4,5) sets others.  As for ImageNet-C,
images are first resized to 256 pixels and cropped to 224; --config.evaluation.corruption_crop_ratio=1.0 disables this,
for small images such as CIFAR's.  To use the official files, <dir>/imagenet-c/<corruption>/<severity>/<class>/, add
--config.data.source=folder:<dir> --config.data.eval_split=imagenet-c.

--suite=shift measures how often two shifted copies of an image get the same class: by default after circular shifts of
up to the whole image; --config.evaluation.shift.kinds=circular,zeros,crop and
--config.evaluation.shift.ranges=quarter,half set others (evaluation/consistency.py).  Crops need the margin that
data.crop_ratio leaves: at 0.875, 224 of 256 pixels.

--suite=confusion --figures writes confusion.csv, draws confusion.png, and the worst mistakes in confusion_mistakes.png.

--suite=segmentation,segmentation_shift,segmentation_orientation is for models that predict label maps: mean IoU,
consistency of the maps under the shifts of config.evaluation.shift (mASCC), and the eight orientations.  By default the
model sees each image once, whole; --config.evaluation.segmentation.window=(512,512)
--config.evaluation.segmentation.stride=(341,341) slides a window, --config.evaluation.segmentation.scales=(0.5,1.0,1.5)
--config.evaluation.segmentation.flip=True averages several views (evaluation/label_maps.py).  --figures draws some of
the maps.

--suite=knn,linear_probe,hematology,patch_knn,patch_linear is for any model with features, which stay frozen and are
computed once for all protocols.  Classes come from the nearest images of data.split or from linear classifiers, label
maps from patches; all are evaluated in the eight orientations of test images.  The linear probe trains 52 heads on
12,500 batches of 1024 random crops; the same command resumes it.  A small probe uses features of uncropped images and
takes minutes: --config.evaluation.linear_probe.augment=False --config.evaluation.linear_probe.steps=1000
--config.evaluation.linear_probe.batch_size=128.  This batch size alone gives the probe of the octic ViTs' command, on
1.6 million images instead of 12.8 million.

Table 2 of Jumbo follows SAR's public code, including its probable bugs:

    python -m equivit.evaluate --workdir=<run> --suite=corruptions_sar --config.evaluation.sar.official=True \\
        --config.data.source=folder:<dir> --config.data.eval_split=imagenet-c
"""

import argparse
import functools
import pathlib
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ml_collections import ConfigDict

from equivit import command
from equivit.evaluation import protocols

if TYPE_CHECKING:
    from flax import nnx

FREE = ("data", "batch_size", "seed", "precision", "evaluation")  # the changeable parts of a finished run's config


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    return command.run(functools.partial(_run, options, rest), debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    about = protocols.about()
    width = max(map(len, about))
    protocols_by_name = "\n".join(f"  {name:{width}}  {line}" for name, line in about.items())
    parser = command.parser("evaluate", __doc__, epilog=f"protocols for --suite:\n{protocols_by_name}")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workdir", type=pathlib.Path, help="run directory; evaluates its newest intact checkpoint")
    what.add_argument("--model", type=pathlib.Path, help="saved model; needs --config for the data")
    parser.add_argument("--config", help=f"with --model: {command.CONFIG}")
    parser.add_argument("--suite", help="protocols, separated by commas; by default the suite of the config")
    parser.add_argument("--weights", help="with --workdir: averaged (objective.ema), or student instead of teacher")
    parser.add_argument(
        "--figures", action="store_true", help="draw the figures of the protocols and the patch filters"
    )
    parser.add_argument("--distributed", action="store_true", help="join the other processes of the evaluation")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(options: argparse.Namespace, rest: list[str]) -> None:
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from equivit.evaluation import runner, summary
    from equivit.training import loading, sharding
    from equivit.training.run import processes

    processes.join(options.distributed)
    if jax.distributed.is_initialized():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX keeps it for the next checkpoint; there is none
    config, model, step = _load(options, command.changes(rest, _parser()))
    names = runner.check(options.suite or config.evaluation.suite, config, model)
    if not names:
        fitting = ", ".join(runner.fitting(model)) or "none"
        raise ValueError(f"--suite: name protocols for this {type(model).__name__}; those that fit it: {fitting}.")
    place = options.workdir or options.model
    data = loading.trained_on(place)
    of = f"{place} (weights of step {step})" if options.workdir else place
    about = summary.subject(config, step=step, weights=options.weights)
    command.say(f"Evaluating {', '.join(names)} of {of} on {about['data']}, images of {about['image_size']}.")
    writes, done = _can_write(place), "results are printed above only"
    mesh = sharding.create_mesh(ConfigDict(dict(data=-1, fsdp=1)))
    with jax.set_mesh(mesh):
        model = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
        results = runner.evaluate(
            model, config, names, track=_track, directory=place if writes else None, classes=data.classes
        )
        if jax.process_index() == 0:
            try:  # an error in storing or in printing must not lose hours of work
                if writes:
                    done = summary.write(place, results, **about)
            finally:
                lines = summary.rows(results)
                _print(lines, summary.text(lines))
        pictures = summary.draw(place, model, config, results) if options.figures and writes else {}
    if jax.process_index() == 0:
        for picture in pictures.values():
            command.say(f"Drawn: {picture}")
        command.say(f"Done: {done}")


def _can_write(place: pathlib.Path) -> bool:
    """Whether the results can be written; if not, warn before the evaluation rather than after it."""
    from equivit.evaluation import summary

    try:
        summary.check_writable(place)
    except OSError as error:
        command.say(f"{error}  Results are only printed.")
        return False
    return True


def _load(options: argparse.Namespace, changes: list[str]) -> "tuple[ConfigDict, nnx.Module, int | None]":
    """The changed and checked config, the model, and the step of a run.

    The batch size changes last, without the checks of training, such as the groups of mixup that must divide it.
    """
    from equivit import constraints
    from equivit.models import saved
    from equivit.training import checkpoints
    from equivit.training import config as configs
    from equivit.training.run import held_out_list

    sizes = [change for change in changes if change.partition("=")[0] == "batch_size"]
    others = [change for change in changes if change not in sizes]
    if options.model:
        if options.weights:
            raise ValueError("--weights is only for --workdir; a saved model has one set of weights.")
        if not options.config:
            raise ValueError(f"--model={options.model} needs --config=FILE, for the data of the evaluation.")
        config, model, step = configs.load(options.config, others), saved.load(options.model), None
    else:
        if options.config:
            raise ValueError(
                "--config is only for --model; a run has its own config, change it with --config.KEY=VALUE."
            )
        for change in others:
            if change.partition("=")[0].split(".")[0] not in FREE:
                raise ValueError(f"--config.{change}: a run keeps this setting; only {', '.join(FREE)} can be changed.")
        config, model, step = checkpoints.load_run(options.workdir, weights=options.weights)
        _override(config, others)
        configs.check_values(config)
        held_out_list.check(options.workdir, config.data)
    _override(config, sizes)
    constraints.check("config.batch_size", config.batch_size, constraints.PositiveInt)
    return config, model, step


def _override(config: ConfigDict, changes: list[str]) -> None:
    from equivit.training import config as configs

    with config.unlocked():
        for change in changes:
            configs.override(config, change)


def _track(batches: Iterable, total: int, name: str) -> Iterator:
    """Yield the batches and show progress, as a bar on a terminal, otherwise as a line for each 10 %."""
    import jax
    import rich.progress

    if jax.process_index() != 0:
        yield from batches
    elif sys.stdout.isatty():
        yield from rich.progress.track(batches, total=total, description=name)
    else:
        for done, batch in enumerate(batches, start=1):
            yield batch
            if done * 10 // total > (done - 1) * 10 // total:
                command.say(f"{name}: {done} of {total} batches")


def _print(lines: list[tuple[str, str]], plain: str) -> None:
    """Print the lines as a table on a terminal that is wide enough, otherwise as plain text."""
    import rich.box
    import rich.console
    import rich.table

    console = rich.console.Console(markup=False, emoji=False)  # class names are any text, such as "sky [void]"
    if not sys.stdout.isatty() or max(map(len, plain.splitlines())) > console.width - 4:  # a box would break long rows
        print(plain, flush=True)
        return
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False)
    for line in lines:
        table.add_row(*line)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
