r"""Blood cells by frozen features before and after training on them: Table 7 of octic ViTs.

    python -m equivit.train --config=configs/dinobloom.py:I8 --workdir=runs/cells/I8 --config.init=runs/dinov2/L_I8 \
        --config.data.source=list:cells.txt
    python -m experiments tables.octic.hematology runs/cells --source=csv:bmc_{split}.csv

Takes the DINOv2 runs in the directory, at any depth: the teacher of each, and the model in `config.init` if it still
exists.  The protocol `hematology` is evaluated on --source, upright and in the eight orientations, where that has not
been done; results lie in the run's directory, and are refused where --source or --override was another.

Weighted F1, accuracy and balanced accuracy are in percent.  The paper's balanced accuracy depends on classes with one
to nine test images; the JSON also has it without them, and 95 % intervals.  Claim: I8 has the same class in all
orientations for at least 99.9 % of the images.
"""

import itertools

from equivit.training import config as configs
from equivit.training import loading
from experiments import findings
from experiments.findings import Claim
from experiments.tables import finished_runs, papers
from experiments.tables.octic.stored_evaluations import load_or_evaluate

CLASSIFIERS = {"knn1": "1-NN", "knn20": "20-NN", "linear": "linear"}
SCORES = {"weighted_f1": "wF1", "accuracy": "Acc", "balanced_accuracy": "bAcc"}
FILES = {"before": "hematology_before.json", "after": "hematology.json"}


COLUMNS = dict(model="", when="", turned="same in eight")
for classifier, words in CLASSIFIERS.items():
    COLUMNS |= {f"{classifier}_{score}": f"{words} {short}" for score, short in SCORES.items()}


def main(arguments=None) -> int:
    parser = finished_runs.parser(__doc__, __file__)
    parser.add_argument("--source", help="labelled cells, such as csv:<file>; without it, what has been evaluated")
    parser.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options = parser.parse_args(arguments)
    if options.override and options.source is None:
        parser.error("--override is for an evaluation, and --source is missing; give the labelled cells")
    rows, results, claims = [], {}, []
    finished = [run for run in finished_runs.read(options.runs) if run.report is not None]
    for run, when in itertools.product((run for run in finished if run.config.objective.name == "dinov2"), FILES):
        if (found := evaluated(run, when, options)) is not None:
            results[f"{run.place}, {when}"] = found
            cells = dict(model=str(run.place), when=when, turned=100 * found["linear"]["turned"]["consistency"])
            for name, score in itertools.product(CLASSIFIERS, SCORES):
                cells[f"{name}_{score}"] = 100 * found[name][score]
            rows.append(cells)
            if getattr(run.model, "family", None) == "I8":  # an invariant model
                for name, words in CLASSIFIERS.items():
                    text = f"{run.place}, {when}, {words}: share unchanged"
                    claims.append(Claim(text, found[name]["turned"]["consistency"], at_least=0.999))
    rows += papers.rows(__file__, "paper_hematology.csv", words=("model", "when"))  # of ViT-L
    print(findings.table(rows, COLUMNS))
    return findings.finish(options, dict(rows=rows, results=results), claims)


def evaluated(run, when: str, options) -> dict | None:
    """The results of the protocol, from their file if there is one; None where there is nothing to evaluate."""
    file, source = run.place / FILES[when], str(run.place) if when == "after" else run.config.init
    if options.source is None:
        return {key: value for key, value in findings.read_json(file).items() if key != "settings"} or None
    model = None
    if not file.is_file():
        if source is None:
            return None
        try:
            model = loading.load_model(source)
        except FileNotFoundError:
            print(f"{run.place}: its initial model {source} does not exist any more")
            return None

    def compute():
        config = run.config.copy_and_resolve_references().unlock()
        for text in (f"data.source={options.source}", *options.override):
            configs.override(config, text)
        return finished_runs.protocols(config.lock(), model, ("hematology",))["hematology"]

    return load_or_evaluate(file, dict(source=options.source, overrides=options.override), compute)
