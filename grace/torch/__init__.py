"""Grace for PyTorch."""

import importlib
from typing import Any

from grace.errors import missing_extra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise missing_extra("torch", "torch") from error

from grace import communicators
from grace.communicators import *  # noqa: F403 (a new one needs no line here)
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor, Traits
from grace.core.memory import Memory
from grace.torch.collectives import allgather, allreduce, broadcast
from grace.torch.cuda_graphs import capture
from grace.torch.ddp import DDPState, register_ddp_hook
from grace.torch.distributed_checkpoint import Memories
from grace.torch.fsdp import FSDPState, register_fsdp_hook
from grace.torch.fsdp_all_gather import AllGatherState, compress_all_gather
from grace.torch.fsdp_reduce_scatter import ReduceScatterState, compress_reduce_scatter
from grace.torch.initial_sync import broadcast_optimizer_state, broadcast_parameters
from grace.torch.optimizer import DistributedOptimizer

__all__ = [
    "AllGatherState",
    "Communicator",
    "Compressor",
    "DDPState",
    "DistributedOptimizer",
    "FSDPState",
    "Memories",
    "Memory",
    "Pipeline",  # noqa: F405 (see __getattr__)
    "ReduceScatterState",
    "Traits",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "capture",
    "compress_all_gather",
    "compress_reduce_scatter",
    "register_ddp_hook",
    "register_fsdp_hook",
]
__all__ += communicators.__all__


def __getattr__(name: str) -> Any:
    """Return a lazily imported name: ``elastic`` needs Horovod, and ``Pipeline`` imports much of torch."""
    if name == "Pipeline":
        return importlib.import_module("grace.pipeline.torch.pipeline").Pipeline
    if name == "elastic":
        return importlib.import_module("grace.torch.elastic")
    raise AttributeError(f"module 'grace.torch' has no attribute {name!r}")
