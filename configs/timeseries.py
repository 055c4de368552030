"""PatchTST, with registers and with a Jumbo token, on the UCR and UEA archives; 12 runs per result, trained together.

Jumbo, Section 4.5 and Appendix A.3.2: best test accuracy with 8 patches, plain / registers / Jumbo: ElectricDevices
89.0 / 88.8 / 90.1 %, Crop 80.9 / 81.2 / 82.0 %, MelbournePedestrian 92.1 / 91.5 / 91.0 %; all in its Tables 13 and 14.
Ours: experiments/tables/jumbo/timeseries.json; every run and its cost: experiments/studies/jumbo_time_series.json.

    python -m equivit.sweep --config=configs/timeseries.py --workdir=runs/timeseries --config.data.directory=/data/ucr
    python -m equivit.sweep --config=configs/timeseries.py:multivariate --workdir=runs/timeseries   # through aeon
    python -m equivit.sweep --config=configs/timeseries.py:quicktest --workdir=/tmp/quicktest

The training code is not public.  The paper closely follows PatchTST, whose public code has batch norm after each
branch, adds the attention scores of the previous layer, and normalises each series separately.  Our three models have
layer norm before each branch instead; `public` also trains the public form (experiments/studies/jumbo_time_series.py).
The paper does not list the parameters without weight decay: here vectors, tokens and positions.

aeon lacks InsectSound, FruitFlies, RightWhaleCalls, FaultDetectionA and WalkingSittingStanding: they are read from
--config.data.directory, as <name>_TRAIN.ts and <name>_TEST.ts from timeseriesclassification.com or as .npz.  Others are
read from there or through aeon.  Missing data sets are skipped.
Modes, joined by commas: univariate (the paper's ten sets; the default), multivariate (its other ten), small
(fourteen small univariate sets, three of them the paper's and six in aeon's wheel: 8 patches, Xavier's initial weights,
batches of 64, 1,500 steps, four runs) or quicktest; public.
"""

from equivit.configs import recipes
from equivit.training import sweep_config

SETS = {
    "univariate": "Sleep InsectSound FruitFlies RightWhaleCalls FaultDetectionA ElectricDevices Crop FordB FordA "
    "MelbournePedestrian",
    "multivariate": "Tiselac WalkingSittingStanding SpokenArabicDigits FaceDetection PhonemeSpectra LSST "
    "UWaveGestureLibrary CharacterTrajectories AsphaltPavementTypeCoordinates MotorImagery",
    "small": "MelbournePedestrian Crop ElectricDevices Adiac ECG5000 FaceAll ItalyPowerDemand SyntheticControl Wafer "
    "ACSF1 ArrowHead GunPoint OSULeaf PickupGestureWiimoteZ",
    "quicktest": "synthetic",
}
PUBLIC = ("patchtst_public", "patchtst_public_registers", "patchtst_public_jumbo")


def get_config(mode: str = "univariate"):
    w = recipes.words(mode, "public", sets=SETS)
    chosen = w.sets or "univariate"
    c = sweep_config.get_base()
    c.data.names = tuple(SETS[chosen].split())
    if w.public:
        c.models += PUBLIC
    if chosen == "small":
        c.batch_size, c.patches, c.model.init = 64, (8,), "xavier_uniform"
        c.steps = 1500  # in 100 epochs a set of 36 series would have 100
        c.runs.dropout = (0.1,)
    if chosen == "quicktest":
        c.epochs, c.batch_size, c.patches = 2, 64, (8,)
        c.model.update(width=32, num_heads=4, mlp_dim=64)
        c.runs.update(lr=(3e-3, 1e-3), dropout=(0.0, 0.1))
    return c
