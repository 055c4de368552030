"""The notebook on octic ViTs."""

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_and_shows_the_symmetry():
    text = notebook.run("octic_quickstart", optimised=True)  # most of its time is training
    assert "plain ViT: octic element 'r'" in text
    accuracies = [line.split()[-1] for line in text.splitlines() if "test accuracy" in line]
    assert len(accuracies) == 8 and len(set(accuracies)) == 1  # invariant
    assert float(accuracies[0]) > 0.3  # it learns: chance is 0.1
