"""Running a script of experiments/ from end to end."""

import json

from experiments import flags

ONCE = ["--runs=1", "--warmup=1"]


def status(script, arguments):
    """The exit status of a script; errors about its input are one line."""
    return flags.run(script.main, arguments)


def run(script, tmp_path, *arguments):
    """The exit status and the JSON of a script that was run with these arguments."""
    output = tmp_path / "results.json"
    ended = script.main([f"--output={output}", *arguments])
    written = json.loads(output.read_text())["main"]
    assert {"device", "versions", "commit", "claims", "left_out", "failed"} <= set(written)
    assert written["failed"] == {} and written["left_out"] == []
    return ended, written
