"""The models beside timm's: what is asked of the peer's process, what it may answer, and what is claimed."""

import json
import sys

import pytest

from experiments import conv_models_cpu
from experiments.conv_models_cpu import Peer

# In place of a Python with timm: three parameters, and half a second for each run until it is asked of "gone".
STUB = """#!{python}
import json, sys
print("a library is there")
for line in sys.stdin:
    question = json.loads(line)
    if question.get("run") == "gone":
        break
    print(json.dumps(dict(seconds=0.5) if "run" in question else dict(parameters=3)), flush=True)
"""


@pytest.fixture
def peer(tmp_path):
    path = tmp_path / "python"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    peer = Peer(str(path))
    yield peer
    peer.close()


def test_the_peer_answers_and_must_have_the_same_parameters(peer):
    call = peer.variant("shvit_s1", "contiguous", (8, 224, 224, 3), 3)
    assert call() == call() == 0.5
    with pytest.raises(RuntimeError, match="shvit_s1: ours has 4 parameters and timm's 3"):
        peer.variant("shvit_s1", "contiguous", (8, 224, 224, 3), 4)


def test_a_peer_that_ends_is_told(peer):
    call = peer.variant("shvit_s1", "gone", (8, 224, 224, 3), 3)
    with pytest.raises(RuntimeError, match="torch_timm.py ended at {'run': 'gone'}"):
        call()


def test_models_that_are_not_in_the_zoo_are_skipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(conv_models_cpu.zoo, "names", list)
    output = tmp_path / "out.json"
    assert conv_models_cpu.main(["--models=shvit_s1,bixt_ti_p16", f"--output={output}"]) == 0
    assert json.loads(output.read_text())["rows"] == []
    assert "shvit_s1: not in the zoo; skipped\nbixt_ti_p16: not in the zoo; skipped" in capsys.readouterr().out


def test_claims():
    """Of the model as it is; without a peer nothing is judged."""
    cases = (("shvit_s1", 1.6, False), ("shvit_s1", 1.5, True), ("bixt_ti_p16", 1.2, False), ("shvit_s1", None, None))
    for name, ratio, holds in cases:
        assert conv_models_cpu.claim_of(dict(model=name, over_peer=ratio, folded_over_peer=1.0)).holds is holds
