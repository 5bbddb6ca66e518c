"""Common parts of the backends over torch's and TensorFlow's Horovod."""

import abc
import enum
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from grace.core.backend import Backend, Handle, Tensor
from grace.core.communicator import CompressorArg
from grace.core.waits import timeout_for
from grace.errors import ConfigError, ExchangeError
from grace.kernels import kernels_of

if TYPE_CHECKING:
    from horovod.common.process_sets import ProcessSet

B = TypeVar("B", bound="HorovodBackend")
HOROVOD_ATTRIBUTES = {"_allreduce_grad_async", "_HAS_AGGREGATE_GRAD"}
"""Attributes of the classes that Horovod makes of torch's and of Keras's optimizers: each class has one of them."""


class NoHorovodSubclass:
    """Base class of a distributed optimizer, of whose class Horovod may not derive its own."""

    def __init_subclass__(cls, **kwargs: object):
        super().__init_subclass__(**kwargs)
        if len(cls.__bases__) == 1 and not HOROVOD_ATTRIBUTES.isdisjoint(vars(cls)):
            raise ConfigError(
                "this optimizer is distributed by Grace already, over Horovod where that is the engine: leave out "
                "hvd.DistributedOptimizer"
            )


class Compression(enum.Enum):
    """Horovod's ways of compression, for scripts that have ``grace`` in place of ``hvd``: ``compression=`` takes them.

    >>> Compression.fp16.value
    'fp16'
    """

    none = "none"
    fp16 = "fp16"


def compressor_for(
    optimizer: object, compression: Compression | None, compressor: CompressorArg | None
) -> CompressorArg | None:
    """Return the compressor that was chosen, and refuse choices that only Horovod takes.

    Raises:
        ConfigError: an optimizer that Horovod has made distributed, Horovod's compression, or two choices.

    >>> compressor_for(None, Compression.fp16, None)
    'fp16'
    >>> compressor_for(None, "fp16", None)
    Traceback (most recent call last):
    grace.errors.ConfigError: compression= is Horovod's. Grace's is compressor=: a method's spec, as 'fp16' or 'topk'
    """
    if any(hasattr(optimizer, name) for name in HOROVOD_ATTRIBUTES):
        raise ConfigError(
            "this optimizer is Horovod's DistributedOptimizer already: leave that out, and give Grace the optimizer "
            "that it was made of"
        )
    if isinstance(compression, Compression) and compressor is None:
        return compression.value
    if compression is not None or getattr(compressor, "__module__", "").startswith("horovod."):
        raise ConfigError("compression= is Horovod's. Grace's is compressor=: a method's spec, as 'fp16' or 'topk'")
    return compressor


INSTEAD = {
    "Adasum": "op=grace.Average or grace.Sum: Adasum combines whole gradients, not compressed ones",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm under torchrun, or hvd.SyncBatchNorm under Horovod",
    "callbacks": (
        "grace.tensorflow: BroadcastCallback(0), MetricAverageCallback() and LearningRateWarmupCallback(...)"
    ),
    "elastic": "hvd.elastic, which knows Grace's optimizers",
    "synchronize": "grace.allreduce, which waits for its result",
    **dict.fromkeys(
        ("Min", "Max", "Product"), "grace.allgather(tensor[None]), and .amin(0), .amax(0) or .prod(0) of it"
    ),
    **dict.fromkeys(("allreduce_", "allreduce_async", "allreduce_async_"), "tensor.copy_(grace.allreduce(tensor))"),
    **dict.fromkeys(("broadcast_", "broadcast_async", "broadcast_async_"), "tensor.copy_(grace.broadcast(tensor, 0))"),
    **dict.fromkeys(("allgather_async", "grouped_allreduce", "grouped_allgather"), "a call for each tensor"),
    **dict.fromkeys(("alltoall", "reducescatter"), "hvd's own under Horovod, or torch.distributed's under torchrun"),
    **dict.fromkeys(("nccl_built", "mpi_built", "gloo_built", "mpi_enabled"), "grace.init().describe()"),
}
"""Replacements for names of Horovod's that Grace does not have."""


@dataclass
class Operation:
    """Collective of an exchange, with its input and output.

    Attributes:
        kind: the engine's operation: "allreduce", "allgather", "alltoall", "gather" or "broadcast".
        tensor: the tensor that this rank sends.
        root: the rank that broadcasts, or gathers.
        rows: number of equal parts that the result is cut into; 0 if it is not cut.
        received: the output, once it is there.
    """

    kind: str
    tensor: Tensor
    root: int = 0
    rows: int = 0
    received: Tensor = None

    def result(self) -> Tensor | list[Tensor]:
        """Return the result for the backend's caller. Raise ExchangeError if other ranks sent tensors of another
        length, which Horovod allows."""
        if not self.rows:
            return self.received
        length = self.received.shape[0] // self.rows
        sent = self.tensor.shape[0] // (self.rows if self.kind == "alltoall" else 1)
        if self.received.shape[0] != self.rows * sent:
            raise ExchangeError(
                f"{self.kind} takes tensors of one length, and this rank's has {sent} elements, all {self.rows} ranks' "
                f"have {self.received.shape[0]}: pad them to the longest, whose length an all-gather of lengths tells"
            )
        return [self.received[i * length : (i + 1) * length] for i in range(self.rows)]


class HorovodBackend(Backend):
    """Collectives of one Horovod process set; subclasses run them on torch's and on TensorFlow's tensors.

    Args:
        process_set: the process set; all ranks if left out.
        owns: True to shut Horovod down with the backend.
    """

    hvd: ClassVar[ModuleType]
    """Horovod's module for the framework."""
    name = "horovod"
    pairs_by_name = True
    concatenates = True
    _call_prefix = "grace.call"
    """Prefix of the names of operations that have no label; their number follows."""

    def __init__(self, process_set: "ProcessSet | None" = None, owns: bool = False):
        hvd = self.hvd
        if not hvd.is_initialized():
            raise ConfigError(
                f"Horovod is not initialized for {self.framework}; call grace.init('horovod', "
                f"framework={self.framework!r}) or {hvd.__name__}.init() first"
            )
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self.owns = owns
        self.rejoin()

    def rejoin(self) -> None:
        """Read this rank's number, the number of ranks and the node's from Horovod, which was initialized (again)."""
        self.included = self.process_set.included()
        self.rank, self.size = (self.process_set.rank(), self.process_set.size()) if self.included else (-1, 1)
        self.local_rank = self.hvd.local_rank()
        self.local_size = self.hvd.local_size()
        self.timeout = timeout_for()
        # The watch compares operations of all ranks; a set of some has others, and in elastic mode ranks change.
        everyone = self.size == self.hvd.size()
        self.watched = everyone and self.size > 1 and not self.elastic
        self.members = None if everyone or not self.included else self.process_set.ranks

    @classmethod
    def join(cls) -> "HorovodBackend":
        """Return a backend over all ranks; initialize Horovod if it is not initialized yet."""
        owns = not cls.hvd.is_initialized()
        if owns:
            set_horovod_timeout(timeout_for())
            cls.hvd.init()
        return cls(owns=owns)

    def describe(self) -> str:
        engine = "MPI" if self.hvd.mpi_enabled() else "Gloo"
        return f"Horovod ({engine}), rank {self.rank} of {self.size}"

    @abc.abstractmethod
    def start(self, operation: Operation) -> Handle:
        """Start an operation; its output becomes ``operation.received``."""

    def allreduce(self, tensor: Tensor) -> Handle:
        self.count(2 * (self.size - 1) / self.size * kernels_of(tensor).nbytes(tensor))
        return self.start(Operation("allreduce", tensor))

    def allgather(self, tensor: Tensor) -> Handle:
        self.count((self.size - 1) * kernels_of(tensor).nbytes(tensor))
        return self.start(Operation("allgather", tensor, rows=self.size))

    def concatenate(self, tensor: Tensor) -> Handle:
        self.count((self.size - 1) * kernels_of(tensor).nbytes(tensor))
        return self.start(Operation("allgather", tensor)).map(lambda whole: [whole])

    def alltoall(self, tensor: Tensor) -> Handle:
        self.count((self.size - 1) / self.size * kernels_of(tensor).nbytes(tensor))
        return self.start(Operation("alltoall", tensor, rows=self.size))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        if root == self.rank:
            self.count((self.size - 1) * kernels_of(tensor).nbytes(tensor))
        return self.start(Operation("broadcast", tensor, root))

    def gather(self, tensor: Tensor, root: int) -> Handle:
        if root == self.rank:
            return self.start(Operation("gather", tensor, root, self.size))
        self.count(kernels_of(tensor).nbytes(tensor))
        return self.start(Operation("gather", tensor, root)).map(lambda _: [])

    def duplicate(self: B) -> B:
        other = type(self)(self.process_set)
        other.timeout = self.timeout
        other._call_prefix = f"{self._call_prefix}.duplicate"
        return other

    def shutdown(self) -> None:
        if self.owns and self.hvd.is_initialized():
            self.hvd.shutdown()

    def _global(self, rank: int) -> int:
        """Return the number, among all ranks, of a rank of the process set."""
        return self.process_set.ranks[rank] if self.process_set.ranks else rank


def alltoall_output(output: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the output of an all-to-all without the sizes of its parts, which some versions return beside it."""
    return output[0] if isinstance(output, (tuple, list)) else output


def set_horovod_timeout(seconds: float) -> None:
    """Let Horovod's own thread wait as long as Grace for a rank that does not answer. Called before ``hvd.init()``.

    A value of the user's stays. So do Horovod's values in elastic mode, where others may continue without that rank.
    """
    if os.environ.get("HOROVOD_ELASTIC") != "1":
        os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(math.ceil(seconds)))
