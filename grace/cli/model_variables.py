"""The variables of a user's model, whatever its framework."""

import importlib
import sys
from pathlib import Path
from typing import Any

from grace.core.variable import Variable, unwrap_names
from grace.errors import ConfigError


def model_variables(model: Any) -> list[Variable]:
    """The trainable variables of a torch module or a Keras model, in order; embeddings of torch with ``sparse=True``,
    and Keras's, are sparse. A list of :class:`~grace.core.variable.Variable` is taken as it is.

    Raises:
        ConfigError: it is none of these.
    """
    torch: Any = sys.modules.get("torch")
    keras: Any = sys.modules.get("keras")
    if torch is not None and isinstance(model, torch.nn.Module):
        sparse = {id(layer.weight) for layer in model.modules() if getattr(layer, "sparse", False) is True}
        found = dict(model.named_parameters())
        return [
            Variable(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), str(p.device), id(p) in sparse)
            for name, p in zip(unwrap_names(list(found)), found.values(), strict=True)
            if p.requires_grad
        ]
    if keras is not None and isinstance(model, keras.Model):
        from grace.tensorflow.variables import names_of

        found = model.trainable_variables
        embeddings = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
        sparse = {id(v) for layer in embeddings for v in layer.trainable_variables}
        return [
            Variable(name, tuple(v.shape), str(v.dtype), "tensorflow", id(v) in sparse)
            for name, v in zip(names_of(found), found, strict=True)
        ]
    if isinstance(model, (list, tuple)) and all(isinstance(v, Variable) for v in model):
        return list(model)
    raise ConfigError(f"a torch module or a Keras model is needed, not {type(model).__module__}.{type(model).__name__}")


def from_spec(spec: str) -> list[Variable]:
    """The variables of what :func:`made_by` makes.

    Raises:
        ConfigError: there is no such module or function, or it makes no model.
    """
    return model_variables(model_of(made_by(spec)))


def model_of(made: Any) -> Any:
    """The model, of it alone or of a tuple that begins with it, as ``grace bench`` takes it."""
    return made[0] if isinstance(made, tuple) and made and not isinstance(made[0], Variable) else made


def made_by(spec: str) -> Any:
    """What ``module:function`` makes: a model, or a tuple that begins with one, as for ``grace bench``; modules are
    found from the current folder too.

    Raises:
        ConfigError: there is no such module or function, or it fails.
    """
    module, _, function = spec.partition(":")
    if not module or not function:
        raise ConfigError(f"a model is given as module:function, as in examples.torch.models:lstm, not {spec!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise ConfigError(f"cannot import {module!r} for the model {spec!r}: {error}") from error
    except AttributeError:
        raise ConfigError(f"{module!r} has no {function!r} for the model {spec!r}") from None
    try:
        return made() if callable(made) else made
    except Exception as error:  # anything may be named
        raise ConfigError(f"{spec!r} makes no model: {type(error).__name__}: {error}") from error
