"""Speeds, memory and accuracies of Jumbo (arXiv 2502.15021): Tables 1 and 4 to 12.

Thousands of images per second are of an RTX 4090, torch.compile, batches of 512; memory is in GB, accuracy in percent.

Errors of the paper are corrected: Table 1 exchanges the FLOPs of ViT-B and of ViT-B with Jumbo; the second SHViT S1 of
Table 10 is S2; the last columns of Table 12 are headed ImageNet-HR, but have values of ImageNet-R.  Our copy has merged
the first columns of Table 12; J follows from the order and the speeds.  BiXT is in Figure 4 alone, without numbers.
"""

import json
import pathlib

from experiments.tables import papers

# Test sets in the order of the columns; each has top-1 and top-5.
SETS = ("val", "real", "v2", "r", "hr")
FIGURES = [f"{name}_{top}" for name in SETS for top in (1, 5)]
RATES = {3e-3: "3e-3", 1e-3: "1e-3"}  # of the stage at 128 px
TITLES = {
    "6": "224 px",
    "7": "registers, 128 px",
    "8": "Jumbo, 128 px",
    "9": "MobileNetV4, 128 px",
    "10": "SHViT, 128 px",
    "11": "EfficientViT, 128 px",
    "12": "J and the multiplier, 128 px",
    "BiXT": "in none of the paper's",
}
# Rows of Tables 6 to 12, and of BiXT.  "words" are of the mode of configs/jumbo_in1k.py, such as "tiny,registers";
# "rate" is of RATES, "" the better one; "speed_224" is beside that at 128 px.
ROWS = papers.rows(__file__, "paper_accuracy.csv", words=("table", "words", "rate"))


# Rows of Tables 1, 4 and 5, at 224 px: "name" and "options" are of the zoo, "parameters" millions, "gflops" billions of
# multiply-adds of linear maps, "top1" on ImageNet-1K after a linear probe in Table 1, else on ImageNet-21K.
COSTS = json.loads(pathlib.Path(__file__).with_name("paper_costs.json").read_text())


def speeds() -> dict[tuple[str, str, int], float]:
    """Thousands of images per second of Tables 6 to 12, by table, words and pixels."""
    found = {}
    for row in ROWS:
        for pixels, speed in ((row["pixels"], row["speed"]), (224, row["speed_224"])):
            if speed is not None:
                found[row["table"], row["words"], pixels] = speed
    return found


def best(words: str, pixels: int) -> float | None:
    """Top-1 on ImageNet's validation set of the better rate, Tables 6 to 11; None: the paper has none."""
    rows = [row for row in ROWS if (row["words"], row["pixels"]) == (words, pixels) and row["table"] != "12"]
    return max((row["val_1"] for row in rows if row["val_1"] is not None), default=None)
