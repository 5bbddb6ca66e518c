"""Grace: gradient compression for data-parallel training.

>>> import grace
>>> grace.Traits.__name__
'Traits'
"""

import importlib
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from grace.backends.horovod import INSTEAD, Compression
from grace.backends.object_collectives import allgather_object, barrier, broadcast_object, from_root
from grace.backends.runtime import init, is_initialized, local_rank, local_size, rank, shutdown, size
from grace.core.arguments import check_keras_backend, do_not_convert, optimizer_type_error
from grace.core.backend import Backend, Handle, Tensor
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor, TensorSpec, Traits
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.outer import OuterOptimizer
from grace.core.registry import known, make, register
from grace.core.state import State
from grace.core.variable import Variable
from grace.core.version import __version__
from grace.errors import ConfigError, ExchangeError, GraceError, MissingExtraError, RankError
from grace.kernels import Kernels, kernels_of
from grace.session.files import save_from_root

if TYPE_CHECKING:  # imported on first use: `import grace` loads few modules
    from grace.communicators.compat import from_params
    from grace.session.by_hand import ByHand

Average, Sum = "average", "sum"
"""Reductions over ranks, as Horovod spells them, for ``op=``."""

__all__ = [
    "Average",
    "Backend",
    "Communicator",
    "Compression",
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
    "OuterOptimizer",
    "RankError",
    "State",
    "Sum",
    "TensorSpec",
    "Traits",
    "Variable",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "from_params",
    "from_root",
    "init",
    "is_initialized",
    "join",
    "kernels_of",
    "known",
    "local_rank",
    "local_size",
    "make",
    "rank",
    "register",
    "save_from_root",
    "shutdown",
    "size",
]


def __getattr__(name: str) -> Any:
    """Import ``grace.torch``, ``grace.tensorflow``, ``grace.integrations`` and ``from_params`` on first use, and
    resolve the names of TensorFlow's Horovod."""
    if name == "from_params":
        return importlib.import_module("grace.communicators.compat").from_params
    if name in ("torch", "tensorflow", "integrations"):
        return importlib.import_module(f"grace.{name}")
    if name in ("DistributedGradientTape", "broadcast_variables"):
        return getattr(importlib.import_module("grace.tensorflow"), name)
    instead = f"; in place of hvd.{name} take {INSTEAD[name]}" if name in INSTEAD else ""
    raise AttributeError(f"module 'grace' has no attribute {name!r}{instead}")


def _make_by_hand(communicator: Communicator) -> "ByHand":
    """Make the runner of a communicator's own steps. Imports sessions and exchanges on first use."""
    return importlib.import_module("grace.session.by_hand").ByHand(communicator)


Communicator.by_hand_factory = _make_by_hand  # core may not import sessions, which lie above it


def _framework_of(value: object) -> ModuleType | None:
    """Return the framework module for the user's object, by its type; None if no imported framework knows it."""
    # an object of a framework that was not imported cannot exist, and importing one takes seconds
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, (torch.Tensor, torch.optim.Optimizer, torch.nn.Module)):
        return importlib.import_module("grace.torch")
    keras = sys.modules.get("keras")
    of_keras = () if keras is None else (keras.optimizers.Optimizer, keras.Model, keras.Variable)
    if isinstance(value, of_keras):
        check_keras_backend()  # TensorFlow need not be installed with another, so do not import it before
        return importlib.import_module("grace.tensorflow")
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and (tensorflow.is_tensor(value) or isinstance(value, tensorflow.Variable)):
        return importlib.import_module("grace.tensorflow")
    return None


def _require_framework(value: object, what: str) -> ModuleType:
    """Return the framework module for the user's object.

    Raises:
        ConfigError: there is none.
    """
    framework = _framework_of(value)
    if framework is None and what == "DistributedOptimizer":
        raise optimizer_type_error(value)
    if framework is None:
        raise ConfigError(
            f"{what} takes a torch or Keras object; {type(value).__module__}.{type(value).__qualname__} is not one"
        )
    return framework


def DistributedOptimizer(optimizer: object, *args: object, **kwargs: object) -> Any:
    """Make an optimizer exchange its gradients compressed; see :func:`grace.torch.DistributedOptimizer` and
    :func:`grace.tensorflow.DistributedOptimizer`.

    >>> DistributedOptimizer(None)
    Traceback (most recent call last):
    grace.errors.ConfigError: grace.DistributedOptimizer takes an optimizer of torch or Keras, not None
    """
    return _require_framework(optimizer, "DistributedOptimizer").DistributedOptimizer(optimizer, *args, **kwargs)


def broadcast_parameters(parameters: object, root: int = 0, *, root_rank: int | None = None) -> None:
    """Broadcast the root's values to every rank, in place: of a module, a state dict, (name, tensor) pairs, a Keras
    model, or variables; see :func:`grace.torch.broadcast_parameters` and :func:`grace.tensorflow.broadcast_variables`.

    >>> import torch
    >>> _ = init("local")
    >>> broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    >>> shutdown()
    """
    framework = _framework_of(parameters)
    if framework is None and isinstance(parameters, Iterable):
        # read into a list first: a generator of pairs could be read once only
        parameters = dict(parameters) if isinstance(parameters, Mapping) else list(parameters)
        pairs = parameters.items() if isinstance(parameters, dict) else parameters
        values = [pair[1] if isinstance(pair, tuple) and len(pair) == 2 else pair for pair in pairs]
        framework = next(filter(None, map(_framework_of, values)), None)  # other values than tensors are skipped
        if framework is None and not values and "torch" in sys.modules:  # a model without parameters
            framework = importlib.import_module("grace.torch")
    framework = framework or _require_framework(parameters, "broadcast_parameters")
    if hasattr(framework, "broadcast_parameters"):
        framework.broadcast_parameters(parameters, root, root_rank=root_rank)
    else:
        variables = parameters.values() if isinstance(parameters, Mapping) else parameters
        framework.broadcast_variables(getattr(variables, "variables", variables), root, root_rank=root_rank)


def broadcast_optimizer_state(optimizer: object, root: int = 0, *, root_rank: int | None = None) -> None:
    """Broadcast the root's momenta and counters to every rank; see :func:`grace.torch.broadcast_optimizer_state`.
    Keras's optimizers have their variables broadcast.

    >>> import torch
    >>> _ = init("local")
    >>> broadcast_optimizer_state(torch.optim.SGD(torch.nn.Linear(2, 1).parameters()), root_rank=0)
    >>> shutdown()
    """
    framework = _require_framework(optimizer, "broadcast_optimizer_state")
    if hasattr(framework, "broadcast_optimizer_state"):
        framework.broadcast_optimizer_state(optimizer, root, root_rank=root_rank)
    else:
        framework.broadcast_variables(optimizer.variables, root, root_rank=root_rank)  # type: ignore[attr-defined]


@do_not_convert  # AutoGraph would compile the choice of the framework into the user's graph
def allreduce(tensor: Tensor, average: bool | None = None, name: str | None = None, **options: object) -> Tensor:
    """Return the average, or the sum, of a tensor over all ranks; see :func:`grace.torch.allreduce` and
    :func:`grace.tensorflow.allreduce`.

    >>> import torch
    >>> _ = init("local")
    >>> allreduce(torch.tensor(3.0), op=Average).item()
    3.0
    >>> shutdown()
    """
    return _require_framework(tensor, "allreduce").allreduce(tensor, average, name, **options)


@do_not_convert
def allgather(tensor: Tensor, name: str | None = None) -> Tensor:
    """Concatenate all ranks' tensors along their first dimension; see :func:`grace.torch.allgather` and
    :func:`grace.tensorflow.allgather`.

    >>> import torch
    >>> _ = init("local")
    >>> allgather(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    >>> shutdown()
    """
    return _require_framework(tensor, "allgather").allgather(tensor, name)


@do_not_convert
def broadcast(tensor: Tensor, root_rank: int, name: str | None = None) -> Tensor:
    """Return the root's tensor on every rank; see :func:`grace.torch.broadcast` and :func:`grace.tensorflow.broadcast`.

    >>> import torch
    >>> _ = init("local")
    >>> broadcast(torch.tensor([1, 2]), root_rank=0).tolist()
    [1, 2]
    >>> shutdown()
    """
    return _require_framework(tensor, "broadcast").broadcast(tensor, root_rank, name)


def join(device: int = -1) -> int:
    """Tell the other ranks that this one has no more batches, like ``hvd.join()``. It calls ``join()`` of the program's
    only distributed optimizer.

    Args:
        device: accepted for Horovod's programs, and ignored.

    Returns:
        The rank that joined last; 0 in one process.

    Raises:
        ConfigError: there is no optimizer of torch, or there are several, or it cannot join; the message has a remedy.

    >>> _ = init("local")
    >>> join()
    0
    >>> shutdown()
    """
    if size() == 1:  # nobody waits for this rank
        return 0
    if "torch" not in sys.modules:
        raise ConfigError(
            "grace.join() is for torch: under Keras give every rank as many batches (steps_per_epoch=...)"
        )
    return importlib.import_module("grace.torch.lifecycle").only_optimizer("join").join()
