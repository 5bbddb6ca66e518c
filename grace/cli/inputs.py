"""Inputs that several commands share: models of users, their variables and gradients, and clusters."""

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from grace.bench.common.user_functions import load_function
from grace.core.compressor import Tensor
from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError
from grace.strategy.builder import Cluster, OneNode

Model = Any
"""Module of torch, model of Keras, or a list of variables: which one, :func:`framework_of` says."""
Loss = Callable[[Model], Tensor]
"""Function that returns the loss of a batch."""
MOST_RANKS = 65_535  # as in the file of a cluster
"""A larger number, a slip of the keyboard, would take all memory: a node is kept for each rank."""

# -- models ---------------------------------------------------------------------------------------------------------


def call_model_function(spec: str) -> object:
    """Return the result of ``module:function``: a model, or a tuple that begins with one, as for ``grace bench``."""
    function = load_function(spec, "model", ())
    try:
        return function()
    except (Exception, SystemExit) as error:  # anything may be named
        raise ConfigError(f"{spec!r} makes no model: {type(error).__name__}: {error}") from error


def model_of(result: object) -> Model:
    """Return the model of a function's result, which is the model alone or a tuple that begins with it."""
    return result[0] if isinstance(result, tuple) and result and not isinstance(result[0], Variable) else result


def framework_of(model: Model) -> str:
    """Return the framework of a model: "torch", "tensorflow", or "numpy" for a list of variables."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    return "numpy" if isinstance(model, (list, tuple)) else "tensorflow"


def load_variables(spec: str) -> list[Variable]:
    """Return the variables of the model that ``module:function`` makes."""
    return model_variables(model_of(call_model_function(spec)))


def model_variables(model: Model) -> list[Variable]:
    """Return the trainable variables of a torch module or a Keras model, in order; a list of variables as it is.

    Embeddings of torch with ``sparse=True``, and Keras's, are sparse.
    """
    torch: Any = sys.modules.get("torch")
    keras: Any = sys.modules.get("keras")
    if torch is not None and isinstance(model, torch.nn.Module):
        from grace.torch.parameters import find_sparse_parameters, make_variables

        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        names = unwrap_names([name for name, _ in trained])
        parameters = {name: p for name, (_, p) in zip(names, trained, strict=True)}
        return make_variables(parameters, find_sparse_parameters(model))
    if keras is not None and isinstance(model, keras.Model):
        from grace.tensorflow.variables import describe_variable, names_of

        found = model.trainable_variables
        # nested layers, too, which Keras has no public function for
        embeddings = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
        sparse = {id(v) for layer in embeddings for v in layer.trainable_variables}
        return [describe_variable(name, v, id(v) in sparse) for name, v in zip(names_of(found), found, strict=True)]
    if isinstance(model, (list, tuple)) and all(isinstance(v, Variable) for v in model):
        return list(model)
    raise ConfigError(f"a torch module or a Keras model is needed, not {type(model).__module__}.{type(model).__name__}")


# -- gradients ------------------------------------------------------------------------------------------------------


def to_tensor(framework: str, array: np.ndarray, device: str = "cpu") -> Tensor:
    """Return a copy of an array as a tensor of "torch", "tensorflow" or "numpy"."""
    module: Any = importlib.import_module(framework)
    if framework == "torch":
        return module.tensor(array, device=device)
    return module.constant(array) if framework == "tensorflow" else array.copy()


def random_gradients(
    framework: str, variables: Iterable[Variable], random: np.random.Generator, device: str | None = None
) -> dict[str, Tensor]:
    """Return gradients with Gaussian elements, by name; none of variables that are sparse or empty.

    Args:
        framework: "torch", "tensorflow" or "numpy".
        variables: the variables.
        random: the source of the elements.
        device: the device of torch's tensors; by default that of each variable.

    >>> sorted(random_gradients("numpy", [Variable("w", (2,)), Variable("b", (0,))], np.random.default_rng(0)))
    ['w']
    """
    found = {}
    for variable in variables:
        if not variable.sparse and variable.numel:
            array = np.asarray(0.01 * random.standard_normal(variable.shape, np.float32), np.float32)
            found[variable.name] = to_tensor(framework, array, device or variable.device)
    return found


# -- clusters -------------------------------------------------------------------------------------------------------


def load_cluster(resources: Path | None, ranks: int | None) -> Cluster | None:
    """Return the cluster of a file, or so many ranks on one node; None without both. Refuse both together."""
    if ranks is not None and resources is not None:
        raise ConfigError(f"{resources} says how many ranks there are; -n is for planning without a cluster's file")
    if resources is not None:
        from grace.launch.cluster import Resources

        return Resources.load(resources)
    return None if ranks is None else OneNode(ranks)
