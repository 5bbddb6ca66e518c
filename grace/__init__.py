"""Grace: gradient compression for data-parallel training.

>>> import grace
>>> grace.Traits.__name__
'Traits'
"""

import importlib
import sys
from typing import Any

from grace.backends.runtime import from_root, init, local_rank, rank, shutdown, size
from grace.communicators.base import Communicator
from grace.communicators.compat import from_params
from grace.core.backend import Backend, Handle
from grace.core.compressor import Compressor, Traits
from grace.core.context import Context
from grace.core.given import keras_backend, keras_runs_on, not_an_optimizer
from grace.core.memory import Memory
from grace.core.registry import known, make, register
from grace.core.state import State
from grace.core.variable import Variable
from grace.core.version import __version__
from grace.errors import ConfigError, ExchangeError, GraceError, MissingExtraError, RankError
from grace.kernels import Kernels, kernels_of
from grace.session import by_hand  # noqa: F401 - which communicators are given
from grace.session.files import save_from_root

__all__ = [
    "Backend",
    "Communicator",
    "Compressor",
    "ConfigError",
    "Context",
    "DistributedOptimizer",
    "ExchangeError",
    "GraceError",
    "Handle",
    "Kernels",
    "Memory",
    "MissingExtraError",
    "RankError",
    "State",
    "Traits",
    "Variable",
    "__version__",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "from_params",
    "from_root",
    "init",
    "kernels_of",
    "known",
    "local_rank",
    "make",
    "rank",
    "register",
    "save_from_root",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    """``grace.torch``, ``grace.tensorflow`` and ``grace.integrations`` need no import of their own."""
    if name in ("torch", "tensorflow", "integrations"):
        return importlib.import_module(f"grace.{name}")
    raise AttributeError(f"module 'grace' has no attribute {name!r}")


def _framework(value: Any, what: str) -> Any:
    """The framework module for the user's object, by its type; only imported frameworks are considered."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, (torch.optim.Optimizer, torch.nn.Module)):
        return importlib.import_module("grace.torch")
    keras: Any = sys.modules.get("keras")
    if keras is not None and isinstance(value, keras.optimizers.Optimizer):
        if keras_backend() != "tensorflow":  # whose optimizers TensorFlow need not be installed for
            raise keras_runs_on(keras_backend())
        return importlib.import_module("grace.tensorflow")
    if what == "DistributedOptimizer":
        raise not_an_optimizer(value)
    raise ConfigError(
        f"{what} takes a torch or Keras object; {type(value).__module__}.{type(value).__qualname__} is not one"
    )


def DistributedOptimizer(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Make an optimizer exchange its gradients compressed; see :func:`grace.torch.DistributedOptimizer` and
    :func:`grace.tensorflow.DistributedOptimizer`.

    >>> DistributedOptimizer("adam")
    Traceback (most recent call last):
    grace.errors.ConfigError: grace.DistributedOptimizer takes an optimizer of torch or Keras, not 'adam'
    """
    return _framework(optimizer, "DistributedOptimizer").DistributedOptimizer(optimizer, *args, **kwargs)


def broadcast_parameters(parameters: Any, root: int = 0) -> None:
    """Give every rank the root's values of a module, in place; see :func:`grace.torch.broadcast_parameters`."""
    _framework(parameters, "broadcast_parameters").broadcast_parameters(parameters, root)


def broadcast_optimizer_state(optimizer: Any, root: int = 0) -> None:
    """Give every rank the root's momenta and counters; see :func:`grace.torch.broadcast_optimizer_state`."""
    _framework(optimizer, "broadcast_optimizer_state").broadcast_optimizer_state(optimizer, root)
