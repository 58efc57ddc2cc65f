"""Reading packed weights as a model, without the kernels that a plan needs."""

from pathlib import Path

from torch import Tensor, nn

from unrolled import models
from unrolled.decode import saving
from unrolled.decode.builder import MOST_INPUTS
from unrolled.decode.packing import Weights, check_packed, unpack
from unrolled.folders import PLAN_FILE, WEIGHTS_FILE
from unrolled.models import Decoder
from unrolled.models.heads import Categorical
from unrolled.models.saving import SavedModel


def packed_form(path: str | Path) -> Weights | None:
    """Return the form of the packed weights in a folder; None if there are none, or the model's own too.

    Raises:
        ValueError: this library did not write the file, or did so in another layout.
    """
    file = Path(path) / PLAN_FILE
    return saving.form(file) if file.exists() and not file.with_name(WEIGHTS_FILE).exists() else None


def load_model(path: str | Path) -> SavedModel:
    """Read a model from its folder, whether its weights are packed or not.

    A model with packed weights is read as a `Decoder` in fp32 with the rounded weights. If its embedding is
    also the matrix of its head, this matrix is rounded to bfloat16 only.

    Raises:
        ValueError: as `unrolled.models.load` and `unrolled.decode.load`.
    """
    if packed_form(path) is None:
        return models.load(path)
    saved = saving.read(path)
    with saving.Unfilled():
        model = Decoder(saved.model.config)
    try:
        model.load_state_dict(saved.model.state_dict() | _unpacked(model, saved))
    except ValueError as error:
        raise ValueError(f"{Path(path) / PLAN_FILE} is not of this model: {error}") from error
    model.documents = saved.model.documents
    return model


def _unpacked(model: Decoder, saved: saving.Saved) -> dict[str, Tensor]:
    """Return the weights and biases of all linear layers, by their names in the model."""
    layers, found = dict(model.named_modules()), {}
    for name, parts in saved.packed.items():
        layer = layers.get(name)
        if isinstance(layer, Categorical) and layer.project is None:
            continue  # the head uses the embedding, which is among the other parameters
        if not isinstance(layer, nn.Linear):
            raise ValueError(f"{name} is packed, but the model has no such matrix")
        finer = saved.weights == "int4" and "scales" in parts
        weights: Weights = "int8" if finer else saved.weights
        if weights in ("int8", "int4") and layer.in_features > MOST_INPUTS:
            weights = "bf16"  # as `Builder.linear` packs it
        packed = check_packed(name, parts, layer.weight.shape, weights, layer.bias is not None)
        found[f"{name}.weight"] = unpack(packed)
        if packed.bias is not None:
            found[f"{name}.bias"] = packed.bias[: packed.outputs]
    return found
