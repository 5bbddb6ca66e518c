"""Layers that were adapted to data: what they compute with, beside their variables, the same on all ranks."""

from typing import Any

import numpy as np

from grace.core.backend import Backend
from grace.errors import RankError
from grace.session.agreement import first_difference, gather_or_raise

MADE = ("mean", "variance", "bin_boundaries")
"""Attributes of Keras's layers that adapt() sets, and call() computes with."""
DIFFERENT = "the ranks' models have other layers that are adapted to data; the first difference: "


def adapt_alike(model: Any, root: int, backend: Backend) -> None:
    """Let layers that were adapted compute as the root's do, whose variables they have already.

    Functions of the model that were traced with what a layer computed with before are dropped.

    Raises:
        RankError: the ranks have other such layers.
    """
    layers = [layer for layer in model._flatten_layers() if callable(getattr(layer, "finalize_state", None))]
    kinds = [("the layer", type(layer).__name__) for layer in layers]
    states = [_state(layer) for layer in layers]
    told = gather_or_raise(backend, "layers to adapt alike", (kinds, states if backend.rank == root else None))
    if any(other != kinds for other, _ in told):
        raise RankError(first_difference([other for other, _ in told], DIFFERENT, "Make the same model on every rank"))
    stale = False
    for layer, mine, roots in zip(layers, states, told[root][1], strict=True):
        if not mine or mine != roots:
            _take(layer, roots)
            stale = True
    if stale and getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)
    if stale:
        model.test_function = model.predict_function = None


def _state(layer: Any) -> dict[str, Any]:
    """What a layer computes with that is no variable; empty if it is not known."""
    if hasattr(layer, "lookup_table"):
        words = [word.item() if isinstance(word, np.generic) else word for word in layer.get_vocabulary()]
        weights = getattr(layer, "idf_weights_const", None)  # padded, where the layer is
        weights = None if weights is None else np.array(weights)[: len(words)].tolist()
        return {"vocabulary": words, "idf_weights": weights}
    values = {name: getattr(layer, name) for name in MADE if hasattr(layer, name)}
    return {name: None if value is None else np.array(value).tolist() for name, value in values.items()}


def _take(layer: Any, state: dict[str, Any]) -> None:
    """Compute as the layer does that this is the state of."""
    if "vocabulary" in state:
        layer.set_vocabulary(**state)
        return
    layer.finalize_state()
    for name in MADE if _state(layer) != state else ():
        if state.get(name) is not None:
            before = getattr(layer, name)
            setattr(
                layer, name, state[name] if isinstance(before, list) else np.array(state[name], layer.compute_dtype)
            )
