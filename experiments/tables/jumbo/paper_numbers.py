"""Speeds, memory and accuracies of Jumbo (arXiv 2502.15021), as data: Tables 1 and 4 to 12.

Thousands of images per second are of an RTX 4090, torch.compile, batches of 512; memory is in GB, accuracy in percent.

Errors of the paper are corrected: Table 1 exchanges the FLOPs of ViT-B and of ViT-B with Jumbo; the second SHViT S1 of
Table 10 is S2; the last columns of Table 12 are headed ImageNet-HR, but have values of ImageNet-R.  BiXT is in Figure 4
alone, without numbers.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

# Test sets in the order of the columns; each has top-1 and top-5.
SETS = ("val", "real", "v2", "r", "hr")
RATES = {"3e-3": 3e-3, "1e-3": 1e-3}  # of the stage at 128 px
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


class Cell(NamedTuple):
    """One training.

    Attributes:
      words: of the mode of configs/jumbo_in1k.py, such as "tiny,registers".
      pixels: 128, or 224 for the second stage.
      rate: of the stage at 128 px, of RATES, also for runs that begin with it; "": unknown.
    """

    words: str
    pixels: int
    rate: str


class Entry(NamedTuple):
    """A row of Tables 6 to 12.

    Attributes:
      table: its name.
      words, pixels: of a cell.
      rate: of RATES; None: the better one.
      accuracy: top-1 and top-5 by test set, in percent; Table 12 has no "hr", BiXT none.
    """

    table: str
    words: str
    pixels: int
    rate: str | None
    accuracy: Mapping[str, tuple[float, float]]


class Cost(NamedTuple):
    """A row of Tables 1, 4 and 5, at 224 px.

    Attributes:
      table, label: its place.
      name, options: of the zoo.
      speed: thousands of images per second.
      parameters: millions.
      memory: GB.
      gflops: multiply-adds of linear maps, in billions.
      top1: on ImageNet-1K after a linear probe (Table 1), or on ImageNet-21K.
    """

    table: str
    label: str
    name: str
    options: Mapping[str, Any]
    speed: float
    parameters: float
    memory: float
    gflops: float
    top1: float


IN21K = dict(num_classes=10450)
COSTS = [
    Cost("1", "ViT-B", "vit_b16", {}, 3.1, 86.6, 3.3, 16.9, 68.1),
    Cost("1", "ViT-B, Jumbo", "jumbo_vit_b16", {}, 3.1, 130.7, 3.9, 16.5, 73.0),
    Cost("1", "ViT-L", "vit_l16", {}, 1.0, 304.4, 5.0, 59.7, 73.0),
    Cost("1", "ViT-L, Jumbo", "jumbo_vit_l16", {}, 1.0, 382.2, 5.2, 59.9, 74.0),
    Cost("4", "ViT-S, Jumbo", "jumbo_vit_s16", IN21K, 7.9, 88.3, 2.6, 4.6, 44.61),
    Cost("4", "an MLP per layer", "jumbo_vit_s16", {**IN21K, "jumbo_mlp": "per_layer"}, 7.7, 555.6, 4.1, 4.6, 44.95),
    Cost("4", "no Jumbo MLP", "jumbo_vit_s16", {**IN21K, "jumbo_mlp": "none"}, 8.4, 45.8, 2.2, 4.4, 43.64),
    Cost("4", "LoRA, rank 8", "jumbo_vit_s16", {**IN21K, "jumbo_mlp": "lora"}, 7.7, 88.8, 2.5, 4.6, 44.94),
    Cost("4", "J = 10", "jumbo_vit_s16", {**IN21K, "jumbo": 10}, 6.9, 179.9, 3.4, 5.5, 45.62),
    Cost("5", "ViT-B, Jumbo", "jumbo_vit_b16", IN21K, 3.1, 152.5, 4.1, 16.5, 46.95),
    Cost("5", "ViT-B, Registers", "register_vit_b16", IN21K, 2.9, 93.9, 3.5, 18.2, 45.73),
    Cost(
        "5",
        "Registers, width 1024",
        "register_vit_b16",
        {**IN21K, "width": 1024, "num_heads": 16},
        *(1.8, 162.9, 4.5, 32.4, 47.08),
    ),
    Cost("5", "ViT-S, Jumbo", "jumbo_vit_s16", IN21K, 7.9, 88.3, 2.6, 4.6, 44.61),
    Cost("5", "ViT-S, Registers", "register_vit_s16", IN21K, 8.0, 25.7, 2.3, 4.6, 41.48),
    Cost(
        "5",
        "alternative 1",
        "register_vit_s16",
        {**IN21K, "register_mlp": "class_and_registers"},
        *(7.7, 39.9, 2.3, 4.6, 41.51),
    ),
    Cost(
        "5", "alternative 2", "register_vit_s16", {**IN21K, "register_mlp": "registers"}, *(7.7, 39.9, 2.3, 4.6, 42.11)
    ),
]
# Words, thousands of images per second, then the accuracies.
TABLE_6 = """
pico                       43.7  69.0 88.5  76.6 92.3  56.0 79.0  23.5 37.1  77.9 92.6
nano                       31.3  74.0 91.5  81.3 94.7  61.4 83.4  27.4 42.6  83.2 95.0
tiny                       20.4  78.4 94.0  84.8 96.3  66.2 87.0  31.7 47.3  86.8 96.2
small                      7.6   82.7 96.4  88.0 97.8  72.4 90.6  39.0 55.6  90.9 98.3
nano,registers             25.5  61.0 84.1  68.9 88.9  49.1 74.1  18.7 32.4  69.7 88.9
tiny,registers             16.7  74.5 92.3  82.3 95.4  62.5 84.7  28.2 43.5  83.7 95.6
small,registers            6.6   81.9 96.0  87.4 97.7  71.4 90.2  38.0 53.8  90.0 98.0
mobilenetv4_conv_small     33.7  65.6 86.2  73.3 90.7  52.5 75.5  22.3 37.5  75.7 91.3
mobilenetv4_conv_medium    11.2  74.9 92.6  82.4 95.5  63.1 84.8  29.4 45.9  84.7 95.8
mobilenetv4_hybrid_medium  8.8   78.1 94.3  85.0 96.7  67.0 87.5  33.0 49.4  87.2 96.8
shvit_s1                   42.1  67.9 88.2  75.7 92.2  54.7 78.2  23.1 38.0  77.6 92.7
shvit_s2                   34.5  71.0 90.0  78.6 93.6  58.4 80.5  25.6 41.1  80.9 93.9
shvit_s3                   23.7  74.3 92.0  81.6 95.0  61.8 83.5  28.3 43.9  84.0 95.4
efficientvit_b0            25.2  66.3 86.5  73.9 90.7  53.6 76.3  22.2 36.7  75.8 91.0
efficientvit_b1            9.8   76.9 93.5  83.7 96.2  64.5 85.9  31.3 47.2  85.8 96.4
"""
# Table, words, rate, thousands of images per second, then the accuracies.
TABLES_7_TO_11 = """
7   nano,registers             3e-3  107.0  53.6 78.5  60.8 83.6  42.4 67.8  15.9 28.6  61.9 83.4
7   nano,registers             1e-3  107.0  51.9 76.8  59.0 81.8  40.8 65.4  13.7 24.9  60.5 82.6
7   tiny,registers,r=8         3e-3  65.7   68.5 88.8  76.1 92.6  55.7 78.8  24.9 39.4  77.8 92.2
7   tiny,registers             3e-3  59.9   68.8 88.9  76.6 92.6  55.9 79.4  24.8 38.9  78.5 92.5
7   tiny,registers             1e-3  59.9   66.1 87.2  74.0 91.2  54.2 77.0  22.9 36.2  75.4 91.6
7   small,registers,r=8        3e-3  24.6   77.8 93.9  84.3 96.2  65.8 86.3  33.3 48.6  86.8 96.5
7   small,registers            3e-3  21.8   78.1 94.0  84.5 96.3  66.1 86.6  33.3 48.6  86.6 96.5
7   small,registers            1e-3  21.8   78.2 94.1  84.5 96.3  66.4 86.6  33.5 48.4  87.2 96.6
8   pico                       3e-3  136.0  62.4 83.7  69.6 88.1  49.3 72.9  20.1 33.5  71.4 89.1
8   pico                       1e-3  136.0  60.8 82.9  68.0 87.3  48.3 71.8  18.9 31.6  70.3 87.6
8   nano                       3e-3  103.1  67.7 87.5  75.0 91.2  54.3 77.6  24.1 37.5  76.6 92.1
8   nano                       1e-3  103.1  68.4 87.9  75.6 91.6  55.2 78.0  23.8 37.6  77.0 92.1
8   tiny                       3e-3  57.3   73.3 91.2  80.2 94.1  60.5 82.1  28.0 42.2  82.7 94.6
8   tiny                       1e-3  57.3   73.5 91.3  80.3 94.1  60.5 81.8  27.8 42.2  82.8 94.4
8   small                      3e-3  20.4   79.3 94.4  85.3 96.5  67.3 87.0  34.3 49.5  88.3 96.8
8   small                      1e-3  20.4   79.3 94.5  85.1 96.6  66.7 86.7  33.4 48.4  87.7 96.6
9   mobilenetv4_conv_small     3e-3  142.7  62.1 83.6  69.2 88.1  49.1 72.8  20.4 34.3  71.8 89.4
9   mobilenetv4_conv_small     1e-3  142.7  60.0 82.0  67.2 86.7  47.6 71.4  18.9 32.2  69.8 87.7
9   mobilenetv4_conv_medium    3e-3  53.8   73.3 91.5  80.5 94.6  60.6 82.9  27.7 42.8  83.2 95.3
9   mobilenetv4_conv_medium    1e-3  53.8   72.2 90.7  79.4 94.0  59.5 81.7  27.0 42.0  82.0 94.6
9   mobilenetv4_hybrid_medium  3e-3  43.5   74.9 92.4  81.8 95.3  62.4 84.0  29.5 44.8  84.4 95.5
9   mobilenetv4_hybrid_medium  1e-3  43.5   75.2 92.5  82.0 95.3  63.0 84.5  29.1 44.5  84.2 95.4
10  shvit_s1                   3e-3  81.0   63.5 84.9  70.9 89.1  50.8 74.5  22.2 35.7  73.7 90.0
10  shvit_s1                   1e-3  81.0   63.5 85.1  71.0 89.3  50.9 74.4  21.3 34.7  72.9 90.5
10  shvit_s2                   3e-3  76.1   66.6 87.0  73.9 90.8  54.0 76.6  23.9 38.0  76.1 91.7
10  shvit_s2                   1e-3  76.1   66.7 87.0  73.8 90.8  53.7 76.8  24.0 37.8  76.7 92.0
10  shvit_s3                   3e-3  73.8   70.5 89.8  77.7 93.1  58.1 80.4  26.6 41.0  80.4 93.8
10  shvit_s3                   1e-3  73.8   71.2 90.0  78.3 93.3  58.6 80.7  26.7 40.7  80.7 93.9
11  efficientvit_b0            3e-3  98.6   59.5 81.9  66.8 86.7  46.8 70.3  18.6 32.0  69.3 87.6
11  efficientvit_b0            1e-3  98.6   60.8 82.6  68.0 87.2  48.3 71.6  19.3 32.6  70.4 87.7
11  efficientvit_b1            3e-3  38.7   71.8 90.7  79.2 94.0  59.7 81.8  27.4 42.2  81.5 94.4
11  efficientvit_b1            1e-3  38.7   72.8 91.0  79.8 94.2  60.4 81.9  27.1 42.3  82.5 94.8
"""
# Words, thousands of images per second at 128 and at 224 px, then the accuracies.  Our copy of the paper has merged the
# cells of the first columns; J follows from the order and from the speeds.
TABLE_12 = """
tiny,j=2,multiplier=2   71.6 21.6  70.0 89.6  77.5 93.1  57.3 80.0  26.1 40.9
tiny,j=2                69.6 21.5  70.4 89.6  77.8 93.1  57.3 79.8  25.5 39.6
tiny,j=4,multiplier=1   69.6 21.3  71.5 90.4  78.8 93.7  59.2 81.3  26.9 41.7
tiny,j=4,multiplier=2   68.1 21.2  70.6 89.6  77.6 93.0  57.7 79.8  25.9 40.3
tiny,j=4                64.9 20.8  72.2 90.6  79.2 93.6  59.3 81.1  26.6 41.2
tiny,multiplier=1       65.3 20.9  72.1 90.5  79.2 93.7  58.9 81.1  26.4 41.1
tiny,multiplier=2       63.5 20.6  71.8 90.2  78.7 93.3  58.2 80.6  25.8 39.8
tiny                    56.5 19.9  73.0 90.7  79.6 93.7  59.4 81.2  26.8 41.3
small,j=2,multiplier=2  27.2 8.7   77.0 93.5  83.6 96.0  64.6 85.8  31.9 47.9
small,j=2               26.1 8.6   78.1 94.0  84.4 96.3  65.9 86.1  32.8 48.7
small,j=4,multiplier=1  26.1 8.6   77.3 93.6  83.7 96.0  64.9 85.8  32.1 47.8
small,j=4,multiplier=2  24.5 8.5   77.9 93.9  84.0 96.3  65.7 85.9  32.7 48.6
small,j=4               23.6 8.3   77.9 93.8  84.0 96.2  65.7 85.8  32.4 48.0
small,multiplier=1      23.9 8.4   77.6 93.6  84.0 96.1  65.8 85.8  32.1 47.9
small,multiplier=2      22.9 8.2   77.8 93.6  83.8 96.0  65.0 85.3  32.2 47.5
small                   19.5 7.8   78.3 93.8  84.2 96.1  66.1 86.0  32.9 48.6
"""


def entries() -> list[Entry]:
    """All rows of Tables 6 to 12, in their order, and the rows of BiXT."""
    six = [Entry("6", words, 224, None, _accuracy(figures)) for words, _, *figures in _lines(TABLE_6)]
    others = [
        Entry(table, words, 128, rate, _accuracy(figures)) for table, words, rate, _, *figures in _lines(TABLES_7_TO_11)
    ]
    twelve = [Entry("12", words, 128, None, _accuracy(figures)) for words, _, _, *figures in _lines(TABLE_12)]
    bixt = [Entry("BiXT", "bixt_ti_p16", *where, {}) for where in [*((128, rate) for rate in RATES), (224, None)]]
    return [*six, *others, *twelve, *bixt]


def speeds() -> dict[tuple[str, str, int], float]:
    """Thousands of images per second of Tables 6 to 12, by table, words and pixels."""
    found = {("6", words, 224): float(speed) for words, speed, *_ in _lines(TABLE_6)}
    found |= {(table, words, 128): float(speed) for table, words, _, speed, *_ in _lines(TABLES_7_TO_11)}
    for words, small, large, *_ in _lines(TABLE_12):
        found |= {("12", words, 128): float(small), ("12", words, 224): float(large)}
    return found


def best(words: str, pixels: int) -> float | None:
    """Top-1 on ImageNet's validation set of the better rate, Tables 6 to 11; None: the paper has none."""
    rows = [entry for entry in entries() if entry[1:3] == (words, pixels) and entry.table != "12"]
    found = [entry.accuracy["val"][0] for entry in rows if entry.accuracy]
    return max(found, default=None)


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def _accuracy(figures: list[str]) -> dict[str, tuple[float, float]]:
    pairs = zip(map(float, figures[::2]), map(float, figures[1::2]), strict=True)
    return dict(zip(SETS, pairs, strict=False))
