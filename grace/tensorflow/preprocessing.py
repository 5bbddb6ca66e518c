"""Layers that were adapted to data: state that they compute with, besides their variables, made equal on all ranks."""

from typing import Any

import keras
import numpy as np

from grace.core.backend import Backend
from grace.errors import RankError
from grace.session.agreement import first_difference, gather_or_raise

MADE = ("mean", "variance", "bin_boundaries")
"""Attributes of Keras's layers that adapt() sets and call() computes with."""
DIFFERENT = "the ranks' models have other layers that are adapted to data; the first difference: "


def broadcast_adapted_layers(model: keras.Model, root: int, backend: Backend) -> None:
    """Give layers that were adapted to data the state of the root's layers. Their variables were broadcast before.

    Functions of the model that were traced with a layer's former state are dropped.

    Raises:
        RankError: the ranks have other such layers.
    """
    layers = [layer for layer in model._flatten_layers() if callable(getattr(layer, "finalize_state", None))]
    kinds = [("the layer", type(layer).__name__) for layer in layers]
    states = [_state(layer) for layer in layers]
    received = gather_or_raise(backend, "layers to adapt alike", (kinds, states if backend.rank == root else None))
    every_kinds = [rank_kinds for rank_kinds, _ in received]
    if any(rank_kinds != kinds for rank_kinds in every_kinds):
        remedy = "Make the same model on every rank"
        raise RankError(first_difference(every_kinds, DIFFERENT, remedy, backend.number_of))
    stale = False
    for layer, mine, roots in zip(layers, states, received[root][1], strict=True):
        if not mine or mine != roots:
            _apply_state(layer, roots)
            stale = True
    if stale and getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)
    if stale:
        model.test_function = model.predict_function = None


def _state(layer: keras.layers.Layer) -> dict[str, Any]:
    """Return the state, other than variables, that a layer computes with; empty if it is not known."""
    if hasattr(layer, "lookup_table"):
        words = [word.item() if isinstance(word, np.generic) else word for word in layer.get_vocabulary()]
        weights = getattr(layer, "idf_weights_const", None)  # padded, where the layer is
        weights = None if weights is None else np.array(weights)[: len(words)].tolist()
        return {"vocabulary": words, "idf_weights": weights}
    values = {name: getattr(layer, name) for name in MADE if hasattr(layer, name)}
    return {name: None if value is None else np.array(value).tolist() for name, value in values.items()}


def _apply_state(layer: keras.layers.Layer, state: dict[str, Any]) -> None:
    """Let a layer compute with a state that :func:`_state` returned."""
    if "vocabulary" in state:
        layer.set_vocabulary(**state)
        return
    layer.finalize_state()
    if _state(layer) == state:  # finalize_state has computed it from the layer's variables
        return
    for name in MADE:
        if state.get(name) is not None:
            before = getattr(layer, name)
            value = state[name] if isinstance(before, list) else np.array(state[name], layer.compute_dtype)
            setattr(layer, name, value)
