"""Engines that the program, or a framework that it uses, has initialized itself."""

import sys

FRAMEWORKS = ("torch", "tensorflow")
NAMES = {"horovod": "Horovod", "torch": "torch.distributed", "mpi": "MPI"}
"""Names of engines in messages."""


def horovod_framework() -> str:
    """Return the framework for which Horovod is initialized; empty if it is not."""
    for framework in FRAMEWORKS:
        horovod = sys.modules.get(f"horovod.{framework}")
        if horovod is not None and horovod.is_initialized():
            return framework
    return ""


def sizes() -> dict[str, int]:
    """Return the number of ranks that each initialized engine sees, by the engine's name in `grace.init()`.

    >>> sizes()
    {}
    """
    found = {}
    framework = horovod_framework()
    if framework:
        found["horovod"] = sys.modules[f"horovod.{framework}"].size()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        found["torch"] = torch.distributed.get_world_size()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        found["mpi"] = mpi.COMM_WORLD.Get_size()
    return found
