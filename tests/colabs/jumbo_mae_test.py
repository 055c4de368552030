"""The notebook on masked autoencoders with a Jumbo token."""

import re

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_and_learns():
    text = notebook.run("jumbo_mae", optimised=True)  # most of its time is training
    first, last = map(float, re.search(r"loss ([\d.]+) at the first step, ([\d.]+) at the end", text).groups())
    assert last < 0.52 < first  # the mean image alone gives 0.52
