"""Kill runs and commands at random moments, start them again, and compare the end with uninterrupted ones.

    make soak                                                  # all: about 40 minutes on two cores
    python -m tests.soak --only=runs --devices=1,2 --kills=2   # a part

Runs: SIGKILL on 1, 2, 4 and 8 virtual devices, with and without `mesh.fsdp`, with two workers; then two processes, of
which one is killed.  Arrays of the final checkpoint, lines of metrics.jsonl, reports and names of files must be equal.
Commands: export, convert (both ways) and accelerate; files under final names must be whole at every moment.  The
moments are uniform over the time of an uninterrupted run, from a seed.  Exits 1 when something was lost.
"""

import argparse
import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "tests/training/run_config.py:soak"
HANGS = 1800  # seconds after which a process hangs
# Of metrics and reports: times, of no two runs the same.
TIMES = {"images_per_second", "step_seconds", "data_wait_share", "milliseconds", "conditions"}


@dataclasses.dataclass(frozen=True)
class Task:
    """A command to kill.

    Attributes:
      name: for the table.
      commands: the command of each process, for the directory where it writes.
      phase: where it is, by the directory and what has been printed.
      losses: what a finished directory lacks beside an uninterrupted one.
      broken: what a directory has under a final name that is not whole, beside an uninterrupted one.
      environment: of all processes.
    """

    name: str
    commands: Callable[[pathlib.Path], list[list[str]]]
    phase: Callable[[pathlib.Path, str], str]
    losses: Callable[[pathlib.Path, pathlib.Path], list[str]]
    broken: Callable[[pathlib.Path, pathlib.Path], list[str]] = lambda place, whole: []
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def start(self, place: pathlib.Path) -> list[subprocess.Popen]:
        """Start all processes; their output goes to files beside the directory."""
        commands, processes = self.commands(place), []
        several = dict(JAX_COORDINATOR_ADDRESS=f"localhost:{_free_port()}", JAX_NUM_PROCESSES=str(len(commands)))
        for i, words in enumerate(commands):
            variables = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            variables |= {**several, "JAX_PROCESS_ID": str(i)} if len(commands) > 1 else {}
            with _log(place, i).open("w") as log:
                command = [sys.executable, "-m", *words]
                processes.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log))
        return processes

    def finish(self, place: pathlib.Path) -> None:
        """Run to the end; RuntimeError with the output if that fails."""
        for i, process in enumerate(self.start(place)):
            if process.wait(HANGS):
                raise RuntimeError(f"{self.name} ended with status {process.returncode}:\n{_log(place, i).read_text()}")


def _log(place, i=0):
    return place.with_name(f"{place.name}.{i}.log")


def _free_port():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return one.getsockname()[1]


def soak(task: Task, folder: pathlib.Path, kills: int, draw: random.Random) -> list[str]:
    """Kill a task `kills` times, print each kill, and return the losses."""
    folder.mkdir(parents=True)
    whole, begin = folder / "whole", time.monotonic()
    task.finish(whole)
    seconds, phases, lost, place, done = time.monotonic() - begin, collections.Counter(), [], folder / "killed0", 0
    print(f"{task.name}: {seconds:.1f} s uninterrupted", flush=True)
    while done < kills:
        moment, victim = draw.uniform(0, seconds), draw.randrange(len(task.commands(place)))
        phase, losses = _kill(task, place, moment, victim)
        if phase is None:  # it was at its end
            losses += task.losses(place, whole)
            place = folder / f"killed{int(place.name.removeprefix('killed')) + 1}"
        else:
            done += 1
            phases[phase] += 1
            losses += task.broken(place, whole)
            words = f"LOST {'; '.join(losses)}" if losses else ""
            print(f"  kill {done:2}  {moment:6.2f} s  {phase:12} {words}".rstrip(), flush=True)
        lost += losses
    try:
        task.finish(place)
        lost += task.losses(place, whole)
    except RuntimeError as error:
        lost.append(str(error))
    counts = ", ".join(f"{name} {count}" for name, count in sorted(phases.items()))
    print(f"{task.name}: {done} kills ({counts}); lost: {'; '.join(lost) or 'nothing'}", flush=True)
    return [f"{task.name}: {one}" for one in lost]


def _kill(task, place, moment, victim):
    """The phase in which a process was killed, None if it ended before; and what went wrong."""
    processes = task.start(place)
    try:
        status = processes[victim].wait(moment)
        return None, [] if status == 0 else [f"status {status}: {_log(place, victim).read_text().strip()[-300:]}"]
    except subprocess.TimeoutExpired:
        phase = task.phase(place, _log(place, victim).read_text())
        processes[victim].kill()
        return phase, []
    finally:
        for process in processes:  # where one of several is gone, the others end by themselves
            process.wait(HANGS)


# Runs


def run_task(devices: int, fsdp: int, processes: int = 1) -> Task:
    """A run on virtual devices of this machine."""
    several = [f"--config.mesh.fsdp={fsdp}"] + (["--config.data.workers=0"] if processes > 1 else [])

    def commands(place):
        return [["equivit.train", f"--config={CONFIG}", f"--workdir={place}", *several]] * processes

    name = f"{devices} device(s)" if processes == 1 else f"{processes} processes"
    environment = dict(JAX_NUM_CPU_DEVICES=str(devices))
    return Task(f"{name}, fsdp={fsdp}", commands, run_phase, run_losses, environment=environment)


def run_phase(place: pathlib.Path, output: str) -> str:
    """Where a run is: before its first step, in its steps, while a checkpoint is written, or after its last step."""
    if "Starting at step" not in output and "Resuming" not in output:
        return "start"
    if (place / "report.json").is_file():
        return "end"
    saving = any(not path.name.isdigit() for path in (place / "checkpoints").glob("*"))
    return "save" if saving else "steps"


def run_losses(place: pathlib.Path, whole: pathlib.Path) -> list[str]:
    """In what a finished run differs from another."""
    lost, lines = [], [_lines(one / "metrics.jsonl") for one in (place, whole)]
    if lines[0] != lines[1]:
        differing = sum(a != b for a, b in itertools.zip_longest(*lines))
        lost.append(f"metrics.jsonl: {differing} of {len(lines[1])} lines differ")
    names = [{path.name for path in one.iterdir()} for one in (place, whole)]
    if names[0] != names[1]:
        lost.append(f"files: {sorted(names[0] ^ names[1])}")
    reports = [_timeless(json.loads((one / "report.json").read_text())) for one in (place, whole)]
    if reports[0] != reports[1]:
        lost.append("report.json differs")
    steps = [sorted(path.name for path in (one / "checkpoints").iterdir()) for one in (place, whole)]
    if steps[0] != steps[1]:
        return [*lost, f"checkpoints: {steps[0]} in place of {steps[1]}"]
    last = max(steps[0], key=int)
    ours, theirs = (checkpoint(one / "checkpoints" / last)[1] for one in (place, whole))
    other = sorted(name for name in ours.keys() | theirs.keys() if not _same(ours.get(name), theirs.get(name)))
    return [*lost, *([f"arrays: {len(other)} of {len(theirs)} differ, such as {other[0]}"] if other else [])]


def _lines(path):
    return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]


def _timeless(row):
    return {name: value for name, value in row.items() if name not in TIMES}


def _same(a, b):
    return a is not None and b is not None and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def checkpoint(path: pathlib.Path) -> tuple[dict, dict]:
    """The description in a checkpoint, and all of its arrays by name."""
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path.parent) as manager:
        about = manager.restore(int(path.name), args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        like = {name: np.empty(shape, dtype) for name, (shape, dtype) in about["leaves"].items()}
        parts = ({name: like[name] for name in like if name.startswith("optimizer.") == part} for part in (False, True))
        args = dict(zip(("model", "optimizer"), map(ocp.args.StandardRestore, parts), strict=True))
        arrays = manager.restore(int(path.name), args=ocp.args.Composite(**args))
    return about, arrays["model"] | arrays["optimizer"]


# Commands


def command_tasks(folder: pathlib.Path) -> Iterator[Task]:
    """The commands that make something of a small model, which is saved in the folder."""
    model = folder / "model"
    make_model(model)
    size = ["--config.data.image_size=(16,16)", "--config.data.eval_crop=squash"]
    accelerated = [f"--input={model}", "--config=configs/depthwise.py:in1k,quicktest", "--images=12"]
    for name, words, output in (
        ("export", ["export", f"--input={model}", "--image_size=16,16"], "model.onnx"),
        ("convert --to", ["convert", "--to=timm", f"--input={model}"], "weights.safetensors"),
        ("convert --source", ["convert", "--source=timm", f"--input={folder / 'timm.safetensors'}"], "model"),
        ("accelerate", ["accelerate", *accelerated, "--blocks=1", *size], None),
        ("accelerate ens_dw", ["accelerate", *accelerated, "--blocks=1", "--kind=ens_dw", *size], None),
        ("accelerate heads", ["accelerate", *accelerated, "--heads=4", *size], None),
    ):
        yield Task(name, _command(words, output), command_phase, file_losses, broken_files)


def make_model(path: pathlib.Path) -> None:
    """Save a small ViT, and the same in timm's format beside it."""
    from flax import nnx

    from equivit import convert, models
    from equivit.models import saved

    tiny: dict = dict(width=192, depth=2, num_heads=3, patch_size=8, image_size=(16, 16), num_classes=10)
    saved.save(path, models.create("vit_ti16", rngs=nnx.Rngs(0), **tiny))
    given = ["--to=timm", f"--input={path}", f"--output={path.with_name('timm.safetensors')}"]
    if convert.main(given) != 0:
        raise RuntimeError("the model could not be converted")


def _command(words, output):
    def commands(place):
        place.mkdir(exist_ok=True)
        where = f"--output={place / output}" if output else f"--workdir={place}"
        return [[f"equivit.{words[0]}", *words[1:], where]]

    return commands


def command_phase(place: pathlib.Path, output: str) -> str:
    """The first word of the last line that was printed without indentation."""
    lines = [line for line in output.splitlines() if line[:1].isalpha()]
    return lines[-1].split()[0].rstrip(":") if lines else "start"


def broken_files(place: pathlib.Path, whole: pathlib.Path) -> list[str]:
    """Files under final names, in finished stages, that are not as in an uninterrupted run."""
    ours, theirs = _digests(place), _digests(whole)
    return [f"{name} differs" for name in sorted(ours.keys() & theirs.keys()) if ours[name] != theirs[name]]


def file_losses(place: pathlib.Path, whole: pathlib.Path) -> list[str]:
    """In which files a finished directory differs from another."""
    ours, theirs = _digests(place), _digests(whole)
    missing, more = sorted(theirs.keys() - ours.keys()), sorted(ours.keys() - theirs.keys())
    found = [f"{what}: {', '.join(names)}" for what, names in (("missing", missing), ("left", more)) if names]
    return [*found, *broken_files(place, whole)]


def _digests(place):
    """A digest of each file of an output.

    Left out are files that have times in them, pictures of them, what is hidden since it has no final name, and
    training runs but for their reports: these are compared above.
    """
    found = {}
    for path in (path for path in place.rglob("*") if path.is_file()):
        of_run = any((parent / "checkpoints").is_dir() for parent in path.parents) and path.name != "report.json"
        timed = path.suffix in (".png", ".md") or path.name in ("profile.json", "arguments.json")
        if not of_run and not timed and not path.name.startswith("."):
            content = path.read_bytes()
            if path.name == "report.json":
                content = json.dumps(_timeless(json.loads(content))).encode()
            found[str(path.relative_to(place))] = hashlib.sha256(content).hexdigest()
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the soak; returns the exit status."""
    options = _parser().parse_args(arguments)
    folder, begin = pathlib.Path(tempfile.mkdtemp(prefix="soak-")), time.monotonic()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry:UserWarning"
    print(f"seed {options.seed}, in {folder}", flush=True)
    lost, draw, number = [], random.Random(options.seed), 0
    for i, (task, kills) in enumerate(_tasks(options, folder)):
        found = soak(task, folder / str(i), options.kills or kills, draw)
        lost, number = lost + found, number + (options.kills or kills)
        if not found:
            shutil.rmtree(folder / str(i))
    print(f"{number} kills in {(time.monotonic() - begin) / 60:.1f} minutes, {len(lost)} lost", *lost, sep="\n")
    if not lost:
        shutil.rmtree(folder)
    return int(bool(lost))


def _parser():
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="runs,processes,commands", help="parts (%(default)s)")
    parser.add_argument("--devices", default="1,2,4,8", help="virtual devices of the runs (%(default)s)")
    parser.add_argument("--kills", type=int, help="of each run (20), of the two processes (10) and each command (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    return parser


def _tasks(options, folder):
    """The tasks, and how often each is killed."""
    parts = options.only.split(",")
    if "runs" in parts:
        for devices in map(int, options.devices.split(",")):
            yield from ((run_task(devices, fsdp), 20) for fsdp in (1, 2) if devices >= fsdp)
    if "processes" in parts:
        yield run_task(1, 2, processes=2), 10
    if "commands" in parts:
        yield from ((task, 10) for task in command_tasks(folder))


if __name__ == "__main__":
    sys.exit(main())
