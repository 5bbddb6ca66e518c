"""Models and tasks that benchmarks train."""

from grace.bench.workloads.task import Task

__all__ = ["InTorch", "Task"]


def __getattr__(name: str) -> object:
    """Import ``InTorch`` lazily, because it needs torch."""
    if name != "InTorch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grace.bench.workloads.torch_tasks import InTorch

    return InTorch
