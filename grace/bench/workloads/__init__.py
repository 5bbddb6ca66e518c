"""Models and tasks that benchmarks train."""

from typing import Any

from grace.bench.workloads.task import Task

__all__ = ["InTorch", "Task"]


def __getattr__(name: str) -> Any:
    """Import ``InTorch`` lazily, because it needs torch."""
    if name != "InTorch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grace.bench.workloads.torch_tasks import InTorch

    return InTorch
