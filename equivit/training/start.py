"""What a run begins with: its first parameters, and the models that it uses and does not train."""

import pathlib

import jax
from flax import nnx
from ml_collections import ConfigDict

from equivit import logical, pretrained
from equivit.models import saved, zoo
from equivit.models.decoders import MaskedAutoencoder
from equivit.training import checkpoints, program


def load_model(place: str) -> nnx.Module:
    """The model at a place that a config names.

    Args:
      place: a run directory, a saved model, or pretrained weights as "<source>:<file>" (`pretrained.load`).

    Raises:
      FileNotFoundError: there is none.
    """
    source, colon, file = place.partition(":")
    if colon and source in pretrained.FORMATS:
        return pretrained.load(source, file)
    directory = pathlib.Path(place)
    if (directory / "model.json").is_file():
        return saved.load(directory)
    if (directory / "config.json").is_file():
        return checkpoints.load_run(directory)[1]
    raise FileNotFoundError(
        f"'{place}' is neither a run nor a saved model, nor weights such as 'timm:model.safetensors' (the sources are "
        f"{', '.join(pretrained.FORMATS)})."
    )


def given_models(config: ConfigDict) -> dict[str, nnx.Module]:
    """The models that an objective is given (`Step.given`): "teacher", where it has one.

    `objective.teacher` is a place (`load_model`), or "zoo:<name>", a model with random weights, to try a recipe out.
    """
    place = config.objective.get("teacher")
    if place is None:
        return {}
    source, _, name = place.partition(":")
    if source != "zoo":
        return {"teacher": load_model(place)}
    model, data = config.model, config.data
    size = data.train_image_size or data.image_size
    options = dict(image_size=size, num_classes=model.num_classes, in_channels=model.in_channels)
    return {"teacher": zoo.create(name, **options)}


def initial_parameters(config: ConfigDict) -> dict[str, jax.Array]:
    """The parameters of the model at `config.init` (`load_model`), to begin with; empty if it is None.

    Resizes a table of positions for another image size, leaves out a head for other classes, so that a new one is
    drawn, and takes the encoder of a masked autoencoder.  Prints what it did.  Raises ValueError naming the parameters
    that do not fit the model of the config.
    """
    if config.init is None:
        return {}
    model = load_model(config.init)
    like = jax.eval_shape(lambda: logical.take(program.make_model(config, nnx.Rngs(0))))
    dropped = []
    if isinstance(model, MaskedAutoencoder):
        model, dropped = model.encoder, ["its decoder is left out"]
    arrays, notes = _fitted(model, like)
    new_head = {leaf: array for leaf, array in like.items() if leaf.startswith("head.") and leaf not in arrays}
    if lines := checkpoints.differences({**arrays, **new_head}, like):
        hint = ""
        if any(line.startswith("position.") for line in lines):
            hint = f"  Set config.model.image_size={model.config.image_size}; the model itself then resizes positions."
        raise ValueError(
            f"config.init={config.init}: {len(lines)} parameters do not fit config.model: "
            f"{checkpoints.some(lines)}.{hint}"
        )
    if (said := dropped + notes) and jax.process_index() == 0:
        print(f"{config.init}: {'; '.join(said)}.", flush=True)
    return arrays


def _fitted(model, like):
    """The parameters of `model` as a model with parameters `like` can take them, and what was done to them."""
    arrays, notes = logical.take(model), []
    heads = [{k: a.shape for k, a in tree.items() if k.startswith("head.")} for tree in (arrays, like)]
    if heads[0] != heads[1]:
        arrays = {leaf: array for leaf, array in arrays.items() if leaf not in heads[0]}
        notes.append("a new head is drawn" if heads[1] else "its head is left out")
    table = "position.table"
    if table in arrays and table in like and arrays[table].shape != like[table].shape:
        before, grid = arrays[table].shape[:2], like[table].shape[:2]
        arrays[table] = model.position(grid).reshape(*grid, -1)
        notes.append("positions are resized from {}x{} to {}x{}".format(*before, *grid))
    return arrays, notes
