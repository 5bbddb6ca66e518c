"""MPI backend: mpi4py's non-blocking collectives on the tensors' own memory."""

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

import grace.backends.openmpi  # noqa: F401 - before mpi4py

# isort: split
from mpi4py import MPI

from grace.core.backend import Backend, Handle, Tensor
from grace.core.waits import timeout_for
from grace.core.watch import TimeoutCheck
from grace.errors import RankError, in_one_line, warn
from grace.kernels import kernels_of

SPINS, SHORTEST, LONGEST, SHARE = 50, 50e-6, 1e-3, 0.01
"""Number of tests of a request before the process sleeps between tests; it sleeps for a hundredth of the time that it
has waited, between these bounds in seconds: MPI moves large messages only while it is called."""

NUMBERS = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int64": MPI.INT64_T, "int32": MPI.INT32_T}


def _add_halves(a: Any, b: Any, datatype: MPI.Datatype | None) -> None:
    left, right = np.frombuffer(a, np.float16), np.frombuffer(b, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(left, right, out=right)


def _add_bfloats(a: Any, b: Any, datatype: MPI.Datatype | None) -> None:
    left, right = np.frombuffer(a, np.uint16), np.frombuffer(b, np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        total = _bfloats_to_floats(left) + _bfloats_to_floats(right)
    bits = total.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16  # to nearest, ties to even
    right[:] = np.where(np.isnan(total), 0x7FC0, rounded).astype(np.uint16)


def _bfloats_to_floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


SUMS = {"float16": _add_halves, "bfloat16": _add_bfloats}
"""Sums of dtypes that MPI does not know, which write into the second operand."""


@functools.cache
def _sum_operations() -> dict[str, MPI.Op]:
    """Return MPI operations that sum dtypes which MPI does not know; cached, as a process may create only a few
    operations."""
    return {dtype: MPI.Op.Create(add, commute=True) for dtype, add in SUMS.items()}


class MPIBackend(Backend):
    """Backend over one MPI communicator, for tensors in host memory; others are staged through it.

    MPI knows no 16-bit floats: they are summed by an operation of ours, rounded to nearest after each addition.

    Args:
        comm: an mpi4py communicator, which is duplicated; ``MPI.COMM_WORLD`` if left out.
        timeout: seconds that a collective may take; that of ``grace.init()`` if left out.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Comm | None = None, timeout: float | None = None):
        self.comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.timeout = timeout_for() if timeout is None else timeout
        same = MPI.Comm.Compare(self.comm, MPI.COMM_WORLD)
        self.watched = self.comm.Get_size() > 1 and same == MPI.CONGRUENT  # the watch knows ranks of all by number
        if same not in (MPI.CONGRUENT, MPI.IDENT):
            self.members = self.comm.group.Translate_ranks(group=MPI.COMM_WORLD.group)
        self.rank = self.comm.Get_rank()
        self.size = self.comm.Get_size()
        if comm is None:
            node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
            self.local_rank = node.Get_rank()
            self.local_size = node.Get_size()
            node.Free()
        self.pending: list[MPI.Request] = []
        self.sums = _sum_operations()
        _abort_on_errors(self.comm)

    def describe(self) -> str:
        return f"MPI ({MPI.get_vendor()[0]}), rank {self.rank} of {self.size}"

    def allreduce(self, tensor: Tensor) -> Handle:
        dtype = kernels_of(tensor).dtype(tensor)
        if dtype not in NUMBERS and dtype not in self.sums:
            raise TypeError(f"MPI does not sum {dtype}; it sums {', '.join([*NUMBERS, *self.sums])}")
        self.count(2 * (self.size - 1) / self.size * kernels_of(tensor).nbytes(tensor))
        staged = _Staged(tensor, written=True, ours=dtype in self.sums)
        datatype, op = NUMBERS.get(dtype, MPI.UINT16_T), self.sums.get(dtype, MPI.SUM)
        count = staged.memory.nbytes // datatype.Get_size()
        # NumPy adds what is received, so this way is for host memory.
        if self.size == 2 and isinstance(staged.memory, np.ndarray):
            return self._sum_of_two(staged, dtype, count, datatype)
        return self._handle(self.comm.Iallreduce(MPI.IN_PLACE, [staged.memory, count, datatype], op), staged)

    def _sum_of_two(self, staged: "_Staged", dtype: str, count: int, datatype: MPI.Datatype) -> Handle:
        """Sum over two ranks: they send each other all elements, and each adds.

        Both directions of the network are in use at once. Open MPI's non-blocking sum goes to one rank and back, which
        takes twice as long.
        """
        sent, received = staged.memory, np.empty_like(staged.memory)
        counts = [0, count] if self.rank == 0 else [count, 0]
        request = self.comm.Ialltoallv([sent, counts, datatype], [received, counts, datatype])

        def add() -> None:
            if dtype in self.sums:
                SUMS[dtype](received, sent, None)
            else:
                total = sent.view(dtype)
                with np.errstate(over="ignore", invalid="ignore"):
                    np.add(total, received.view(dtype), out=total)

        return self._handle(request, staged, finish=add)

    def allgather(self, tensor: Tensor) -> Handle:
        k = kernels_of(tensor)
        self.count((self.size - 1) * k.nbytes(tensor))
        sent, received = _Staged(tensor), _Staged(tensor, rows=self.size)
        request = self.comm.Iallgather([sent.memory, MPI.BYTE], [received.memory, sent.memory.nbytes, MPI.BYTE])
        return self._handle(request, received, sent).map(lambda whole: _rows(whole, self.size))

    def alltoall(self, tensor: Tensor) -> Handle:
        self.count((self.size - 1) / self.size * kernels_of(tensor).nbytes(tensor))
        sent, received = _Staged(tensor), _Staged(tensor, rows=1)
        part = sent.memory.nbytes // self.size
        request = self.comm.Ialltoall([sent.memory, part, MPI.BYTE], [received.memory, part, MPI.BYTE])
        return self._handle(request, received, sent).map(lambda whole: _rows(whole, self.size))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        if root == self.rank:
            self.count((self.size - 1) * kernels_of(tensor).nbytes(tensor))
        staged = _Staged(tensor, written=self.rank != root)
        return self._handle(self.comm.Ibcast([staged.memory, MPI.BYTE], root), staged)

    def gather(self, tensor: Tensor, root: int) -> Handle:
        if root != self.rank:
            self.count(kernels_of(tensor).nbytes(tensor))
            staged = _Staged(tensor)
            return self._handle(self.comm.Igather([staged.memory, MPI.BYTE], None, root), staged).map(lambda _: [])
        sent, received = _Staged(tensor), _Staged(tensor, rows=self.size)
        request = self.comm.Igather([sent.memory, MPI.BYTE], [received.memory, sent.memory.nbytes, MPI.BYTE], root)
        return self._handle(request, received, sent).map(lambda whole: _rows(whole, self.size))

    def duplicate(self) -> "MPIBackend":
        # Dup blocks without a timeout; checked_operation() waits for all ranks first, after which it takes little time.
        with self.checked_operation("beside"):
            return self.copy_with(comm=self.comm.Dup(), pending=[])

    def split(self, ranks: Sequence[int]) -> "MPIBackend | None":
        with self.checked_operation("among"):
            comm = self.comm.Split(0 if self.rank in ranks else MPI.UNDEFINED, self.rank)
        if comm == MPI.COMM_NULL:
            return None
        made = MPIBackend(comm, self.timeout)
        comm.Free()
        return made

    def _handle(
        self, request: MPI.Request, received: "_Staged", *alive: "_Staged", finish: Callable[[], None] | None = None
    ) -> Handle:
        """Return a handle whose result is the tensor in ``received``.

        Args:
            request: MPI's request.
            received: the memory that MPI fills.
            alive: further memory that MPI reads until the request is complete.
            finish: called once, when the request is complete.
        """
        self.pending = [other for other in self.pending if not other.Test()]  # Test also lets MPI make progress
        self.pending.append(request)

        def wait() -> None:
            nonlocal alive, finish
            self._wait_for(request)
            if finish is not None:
                finish()
                finish = None
            received.unstage()
            alive = ()

        return Handle(wait, later=lambda: received.result)

    def _wait_for(self, request: MPI.Request) -> None:
        """Test a request until it is complete: a signal, the timeout or a rank that left must be able to end the
        wait."""
        check = TimeoutCheck(self)
        tests = 0
        while not request.Test():
            tests += 1
            if tests > SPINS:
                time.sleep(min(max(SHARE * (time.monotonic() - check.began), SHORTEST), LONGEST))
                check()

    def shutdown(self) -> None:
        """Leave the run; in the middle of a collective end the other ranks too, which would wait for ever."""
        if MPI.Is_finalized() or self.comm == MPI.COMM_NULL:
            return
        if any(not request.Test() for request in self.pending):
            self.comm.Abort(1)
        self.comm.Free()


@functools.cache
def _cuda_aware() -> bool:
    """Return True if this MPI reads and writes a GPU's memory, as Open MPI reports."""
    for library in (None, "libmpi.so.40"):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


def _rows(whole: Tensor, count: int) -> list[Tensor]:
    length = whole.shape[0] // count
    return [whole[i * length : (i + 1) * length] for i in range(count)]


class _Staged:
    """Memory of a tensor in the form that MPI takes: bytes, without a copy, or a copy in host memory.

    A GPU's memory goes to MPI itself where MPI is CUDA-aware, except for sums that are operations of ours. Where
    tensors cannot change, the memory that MPI writes becomes a new one.

    Args:
        tensor: the tensor to send, or one with the shape and dtype of received ones.
        written: True if MPI changes it.
        rows: number of tensors like it that MPI writes; 0 for the tensor itself.
        ours: True if MPI calls an operation of ours on it.
    """

    _warned = False

    def __init__(self, tensor: Tensor, written: bool = False, rows: int = 0, ours: bool = False):
        k = kernels_of(tensor)
        self.like = tensor
        self.dtype = k.dtype(tensor)
        self.shape = (rows * tensor.shape[0], *tensor.shape[1:]) if rows else tuple(tensor.shape)
        self.copy = None
        self.adopted = not k.mutable and bool(written or rows)
        if self.adopted:
            self.memory: Tensor = k.host_buffer(k.nbytes(tensor) * (rows or 1))
            if not rows:
                self.memory[...] = np.asarray(k.to_bytes(tensor))
            return
        self.result = k.zeros(self.shape, self.dtype, tensor) if rows else tensor
        self.tensor = k.to_bytes(self.result)
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        if device == "cuda" and _cuda_aware() and not ours:
            import torch

            torch.cuda.current_stream(self.tensor.device).synchronize()  # MPI knows nothing of streams
            self.memory = self.tensor
            return
        if device != "cpu":
            if not _Staged._warned:
                _Staged._warned = True
                warn("gradients go through host memory on their way to MPI and back")
            import torch

            memory = torch.empty(self.tensor.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.copy = memory.copy_(self.tensor)
        self.memory = np.asarray(self.tensor if self.copy is None else self.copy)

    def unstage(self) -> None:
        """Copy the memory that MPI wrote back into the tensor, or make a new tensor of it."""
        if self.adopted:
            self.result = kernels_of(self.like).adopt(self.memory, self.dtype, self.shape, self.like)
        elif self.copy is not None:
            self.tensor.copy_(self.copy)


def _abort_on_errors(comm: MPI.Comm) -> None:
    """Set a hook by which an error that nobody catches ends all ranks: the others would wait for this one for ever."""
    before = sys.excepthook
    rank = MPI.COMM_WORLD.Get_rank()  # users and launchers know a rank by this number
    size = comm.Get_size()
    if getattr(before, "aborts", False):  # another backend of this process has set the hook
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        before(kind, value, trace)
        if size > 1:
            if not issubclass(kind, RankError):  # a RankError follows from another rank's error, which is printed there
                what = in_one_line(str(value))
                print(f"grace: {kind.__name__} on rank {rank} ends all ranks: {what}", file=sys.stderr)
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
