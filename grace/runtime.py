"""The run that this process is part of: ``grace.init()``, ``rank()``, ``size()``, ``shutdown()``."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from grace.backend import Backend
from grace.errors import ConfigError, missing_extra
from grace.local import LocalBackend

BACKENDS = ("auto", "torch", "local")

# Launchers whose engine Grace does not speak: without this check their ranks would train alone, unnoticed.
OTHER_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "SLURM_NTASKS": "srun",
}

_current: Backend | None = None


def init(backend: str | Backend = "auto") -> Backend:
    """Join the run. Call it once, before anything else of Grace's.

    Args:
        backend: "auto" (torch.distributed under torchrun or once its process group exists, else local),
            "torch", "local", or a :class:`~grace.Backend` of your own.

    Returns:
        The backend.

    Raises:
        ConfigError: an unknown name, or a launcher that Grace cannot join.
        MissingExtraError: the backend's package is not installed.

    >>> init("local").describe()
    'local, rank 0 of 1'
    >>> shutdown()
    """
    global _current
    if isinstance(backend, Backend):
        _current = backend
        return backend
    if backend not in BACKENDS:
        raise ConfigError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    name = _detect() if backend == "auto" else backend
    if _current is None or _current.name != name:
        _current = _torch() if name == "torch" else LocalBackend()
    return _current


def current() -> Backend:
    """The backend of this run; ``init("auto")`` if nobody called it yet."""
    return init() if _current is None else _current


def rank() -> int:
    """This process's number, from 0.

    >>> init("local").rank, rank()
    (0, 0)
    >>> shutdown()
    """
    return current().rank


def size() -> int:
    """How many processes take part.

    >>> init("local").size, size()
    (1, 1)
    >>> shutdown()
    """
    return current().size


def shutdown() -> None:
    """Leave the run, and close what ``init`` opened."""
    global _current
    if _current is not None:
        _current.shutdown()
    _current = None


atexit.register(shutdown)


def _detect() -> str:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return "torch"
    if all(key in os.environ for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return "torch"
    for key, launcher in OTHER_LAUNCHERS.items():
        if os.environ.get(key, "1") not in ("", "1"):
            raise ConfigError(
                f"this process was started by {launcher} ({key}={os.environ[key]}), which this version cannot "
                "join. Start it with torchrun, initialize torch.distributed yourself before grace.init(), or "
                "train each process alone with grace.init('local')"
            )
    return "local"


def _torch() -> Backend:
    try:
        import torch.distributed  # noqa: F401
    except ImportError as error:
        raise missing_extra("torch", "torch") from error
    from grace.torch.backends.distributed import TorchBackend

    return TorchBackend.join()
