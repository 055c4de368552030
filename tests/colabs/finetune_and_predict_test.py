"""The notebook on fine-tuning and predictions."""

import re

from tests.colabs import notebook


@notebook.LEAVES_SOCKETS
def test_it_runs_and_predictions_are_as_good_as_the_evaluation_says():
    text = notebook.run("finetune_and_predict")
    evaluated, predicted = map(float, re.search(r"evaluation ([\d.]+), predictions ([\d.]+)", text).groups())
    assert evaluated == predicted > 0.6  # of five classes
    assert float(re.search(r"other images: ([\d.]+) of 100", text)[1]) > 0.4
    assert len(re.findall(r"^\d{4}\.png, (?:five|six|seven|eight|nine):(?: [a-z]+ 0\.\d\d){2}$", text, re.M)) == 8
    turned, shifted = map(float, re.search(r"in ([\d.]+) of the orientations and ([\d.]+)", text).groups())
    assert turned < 0.6 and shifted < 0.6  # an ordinary ViT promises neither
