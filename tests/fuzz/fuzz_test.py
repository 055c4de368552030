"""The attack from a fixed seed, in a process of its own; `make fuzz` goes on with other inputs."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = 50  # inputs of each reader


def run(*arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_the_attack_notices_each_kind_of_fault():
    run("tests.fuzz.harness")


def test_no_file_breaks_a_reader():
    run("tests.fuzz", "--seed=0", f"--examples={EXAMPLES}")
