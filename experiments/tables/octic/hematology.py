r"""Blood cells by frozen features before and after training on them: Table 7 of octic ViTs.

    python -m equivit.train --config=configs/dinobloom.py:I8 --workdir=runs/cells/I8 --config.init=runs/dinov2/L_I8 \
        --config.data.source=list:cells.txt
    python -m experiments tables.octic.hematology runs/cells --source=csv:bmc_{split}.csv

Takes the DINOv2 runs in the directory, at any depth: the teacher of each, and the model in `config.init` if it still
exists.  The protocol `hematology` is evaluated on --source, upright and in the eight orientations, where that has not
been done; results lie in the run's directory.

Weighted F1, accuracy and balanced accuracy are in percent.  The paper's balanced accuracy depends on classes with one
to nine test images; the JSON also has it without them, and 95 % intervals.  Claim: I8 has the same class in all
orientations for at least 99.9 % of the images.
"""

import json
import pathlib

import jax

from equivit.evaluation import runner
from equivit.training import config as configs
from equivit.training import loading, sharding
from experiments import findings, flags
from experiments.findings import Claim
from experiments.tables import finished_runs

CLASSIFIERS = {"knn1": "1-NN", "knn20": "20-NN", "linear": "linear"}
SCORES = {"weighted_f1": "wF1", "accuracy": "Acc", "balanced_accuracy": "bAcc"}
PAPER = {  # by classifier, the scores in this order
    "plain": {"knn1": (78.0, 78.0, 57.6), "knn20": (83.1, 83.6, 54.9), "linear": (84.6, 84.7, 62.2)},
    "I8": {"knn1": (78.1, 78.0, 61.3), "knn20": (83.5, 83.9, 55.7), "linear": (85.0, 85.2, 61.9)},
}
FILES = {"before": "hematology_before.json", "after": "hematology.json"}


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("runs", type=pathlib.Path, help="directory of the runs")
    parser.add_argument("--source", help="labelled cells, such as csv:<file>; without it, what has been evaluated")
    parser.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options = parser.parse_args(arguments)
    rows, results, claims = [], {}, []
    for run in finished_runs.read(options.runs):
        if run.config.objective.name != "dinov2" or run.report is None:
            continue
        for when in FILES:
            if (found := evaluated(run, when, options)) is not None:
                results[f"{run.place}, {when}"] = found
                rows.append(row(run, when, found))
                claims += claims_of(run, when, found)
    rows += [paper_row(family, figures) for family, figures in PAPER.items()]
    print(findings.table(rows, COLUMNS))
    return findings.finish(options, dict(rows=rows, results=results), claims)


COLUMNS = dict(model="", when="", turned="same in eight")
for classifier, words in CLASSIFIERS.items():
    COLUMNS |= {f"{classifier}_{score}": f"{words} {short}" for score, short in SCORES.items()}


def evaluated(run, when: str, options) -> dict | None:
    """The results of the protocol, from their file if there is one; None where there is nothing to evaluate."""
    file = run.place / FILES[when]
    if not file.is_file() and options.source is not None and (when == "after" or run.config.init is not None):
        try:
            model = loading.load_model(str(run.place) if when == "after" else run.config.init)
        except FileNotFoundError:
            print(f"{run.place}: its initial model {run.config.init} does not exist any more")
            return None
        config = changed(run.config, options)
        runner.check(("hematology",), config, model)
        with jax.set_mesh(sharding.create_mesh(config.mesh)):
            found = runner.evaluate(model, config, ("hematology",))["hematology"]
        file.write_text(json.dumps(found, indent=1) + "\n")
    return json.loads(file.read_text()) if file.is_file() else None


def changed(config, options):
    """The config of a run with another source."""
    config = config.copy_and_resolve_references().unlock()
    for text in (f"data.source={options.source}", *options.override):
        configs.override(config, text)
    return config.lock()


def row(run, when, found) -> dict:
    cells = dict(model=str(run.place), when=when, turned=100 * found["linear"]["turned"]["consistency"])
    for classifier in CLASSIFIERS:
        cells |= {f"{classifier}_{score}": 100 * found[classifier][score] for score in SCORES}
    return cells


def paper_row(family, figures) -> dict:
    """The paper's figures of ViT-L."""
    cells: dict = dict(model=f"paper, {family}", when="after")
    for classifier, values in figures.items():
        cells |= {f"{classifier}_{score}": value for score, value in zip(SCORES, values, strict=True)}
    return cells


def claims_of(run, when, found) -> list[Claim]:
    """An invariant model is invariant."""
    if getattr(run.model, "family", None) != "I8":
        return []
    return [
        Claim(f"{run.place}, {when}, {words}: share unchanged", found[name]["turned"]["consistency"], at_least=0.999)
        for name, words in CLASSIFIERS.items()
    ]
