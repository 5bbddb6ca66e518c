"""torch.distributed backend: any process group, gloo or nccl."""

import contextlib
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from grace.backends.topology import MPI_SIZES
from grace.backends.torch_streams import SideStream
from grace.backends.torchrun import private_store
from grace.core.backend import Backend, Channels, Handle
from grace.core.route import DIRECT_BYTES
from grace.core.waits import timeout_for
from grace.core.watch import POLL_SECONDS, TimeoutCheck
from grace.errors import ConfigError, missing_extra

SETTLE_SECONDS = 0.3
"""Seconds that gloo's threads may take to drop references to Python objects after the group was destroyed."""


class TorchBackend(Backend):
    """Backend over one torch.distributed process group.

    Args:
        group: the process group; the default one if left out.
        owns: True to destroy the process group on shutdown.
    """

    name = "torch"
    framework = "torch"
    by_ring = True

    def __init__(self, group: dist.ProcessGroup | None = None, owns: bool = False):
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized; call grace.init() or init_process_group() first")
        self.group = group
        self._world = weakref.ref(dist.group.WORLD)
        self.owns = owns
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is not a member of the process group")
        self.timeout = timeout_for(_timeout(group))
        self._side_streams: dict[torch.device, SideStream | None] = {}
        if os.environ.get("LOCAL_RANK", "").isdigit():  # set by torchrun
            self.local_rank = int(os.environ["LOCAL_RANK"])
        if os.environ.get("LOCAL_WORLD_SIZE", "").isdigit():
            self.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        members = [self._global(rank) for rank in range(self.size)]
        same = members == list(range(dist.get_world_size()))
        self.watched = same and self.size > 1
        self.members = None if same else members  # the watch knows ranks by their numbers among all

    @classmethod
    def join(cls) -> "TorchBackend":
        """Return a backend over the default process group, which is made from the launcher's environment if there is
        none yet."""
        if dist.is_initialized():
            return cls()
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        seconds = timeout_for()
        rendezvous = _mpi_rendezvous() or private_store(seconds)
        dist.init_process_group(kind, timeout=timedelta(seconds=seconds), **rendezvous)
        return cls(owns=True)

    @property
    def is_ended(self) -> bool:
        world = self._world()
        return self.group is None and (world is None or world is not dist.group.WORLD)

    def describe(self) -> str:
        return f"torch.distributed ({dist.get_backend(self.group)}), rank {self.rank} of {self.size}"

    def allreduce(self, tensor: torch.Tensor) -> Handle:
        self.count(2 * (self.size - 1) / self.size * tensor.nbytes)  # as on a ring: reduce-scatter, then all-gather
        return self._start(tensor, tensor, dist.all_reduce, tensor)

    def allgather(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) * tensor.nbytes)
        raw = _as_bytes(tensor)
        result = tensor.new_empty((self.size, tensor.numel()))
        rows = _as_bytes(result)
        if self.size > 3 and not raw.is_cuda and rows.nbytes <= DIRECT_BYTES:  # gloo's all-gather goes round a ring
            copies = raw.expand(self.size, -1).contiguous()
            return self._start(list(result.unbind()), tensor, dist.all_to_all_single, rows, copies)
        return self._start(list(result.unbind()), tensor, dist.all_gather, list(rows.unbind()), raw)

    def alltoall(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) / self.size * tensor.nbytes)
        received = torch.empty_like(tensor)
        parts = list(received.view(self.size, received.numel() // self.size).unbind())
        return self._start(parts, tensor, dist.all_to_all_single, _as_bytes(received), _as_bytes(tensor))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        if root == self.rank:
            self.count((self.size - 1) * tensor.nbytes)
        return self._start(tensor, tensor, dist.broadcast, _as_bytes(tensor), self._global(root))

    def gather(self, tensor: torch.Tensor, root: int) -> Handle:
        raw = _as_bytes(tensor)
        if root != self.rank:
            self.count(tensor.nbytes)
            return self._start([], tensor, dist.gather, raw, None, self._global(root))
        result = tensor.new_empty((self.size, tensor.numel()))
        rows = list(_as_bytes(result).unbind())
        return self._start(list(result.unbind()), tensor, dist.gather, raw, rows, self._global(root))

    def duplicate(self) -> "TorchBackend":
        return self.copy_with(group=self._new_group(range(self.size)), owns=False)

    def split(self, ranks: Sequence[int]) -> "TorchBackend | None":
        group = self._new_group(ranks)
        if self.rank not in ranks:
            return None
        made = TorchBackend(group)
        made.timeout = self.timeout
        return made

    @property
    def channels(self) -> Channels:
        """Channels over the same ranks, which all backends of one process group share; they end when the group does."""
        return self._channels_of.setdefault(self.group or dist.group.WORLD, Channels())

    _channels_of: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup | None, Channels]] = weakref.WeakKeyDictionary()

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Make a process group of some of the ranks; all of those ranks must call it. None on other ranks."""
        numbers = [self._global(rank) for rank in ranks]
        options: dict[str, Any] = {"timeout": timedelta(seconds=self.timeout)}
        if numbers != sorted(numbers):
            options["sort_ranks"] = False
        if self.size == dist.get_world_size():
            return dist.new_group(numbers, backend=dist.get_backend(self.group), **options)
        # Ranks outside do nothing, so torch names the group by its ranks and by how many groups this process knows.
        # These are fewer on a rank that is left out of another group: then ranks look for each other under different
        # names, for ever. And a name comes twice when a group was destroyed. So the ranks agree on one.
        name = self.allgather_object(uuid.uuid4().hex)[0]
        c10d: Any = dist.distributed_c10d
        world: Any = dist.group.WORLD
        original = c10d._process_group_name
        c10d._process_group_name = lambda *_, **__: f"grace.{name}"
        try:
            if world.bound_device_id is not None:  # NCCL splits a communicator: this one, not that of all
                return dist.split_group(self.group, [list(ranks)], timeout=options["timeout"])
            if self.rank not in ranks:
                return None
            return dist.new_group(
                numbers, backend=dist.get_backend(self.group), use_local_synchronization=True, **options
            )
        finally:
            c10d._process_group_name = original

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def tensor_of(self, array: np.ndarray) -> torch.Tensor:
        group: Any = self.group or dist.group.WORLD
        cpu = torch.device("cpu") in group._device_types
        return torch.tensor(array, device="cpu" if cpu else torch.cuda.current_device())

    def _side_stream(self, device: torch.device) -> SideStream | None:
        """Return the stream that a GPU's collectives start on; None over engines without one."""
        if device not in self._side_streams:
            group: Any = self.group or dist.group.WORLD
            self._side_streams[device] = SideStream(device) if "nccl" in group._get_backend(device).name() else None
        return self._side_streams[device]

    def _start(
        self,
        result: torch.Tensor | list[torch.Tensor],
        sent: torch.Tensor,
        collective: Callable[..., dist.Work],
        *args: torch.Tensor | list[torch.Tensor] | int | None,
    ) -> Handle:
        """Start a collective of torch's, and return its handle; on a GPU ``wait()`` only makes later work on it wait.

        Args:
            result: the tensor, or tensors, that the collective fills.
            sent: the tensor that it sends.
            collective: a function of ``torch.distributed``.
            args: its arguments.
        """
        begin = partial(collective, *args, group=self.group, async_op=True)
        side = self._side_stream(sent.device) if sent.is_cuda else None
        if side is not None:  # NCCL: collectives overlap with computation on a stream of their own
            begun = side.start(begin, [sent, *(result if isinstance(result, list) else [result])])
            return Handle(lambda: side.join(begun), result, (begun,))
        work = begin()
        if sent.is_cuda:
            return Handle(work.wait, result, (work,))
        return Handle(partial(self._wait_on_host, work), result, (work,))

    def _wait_on_host(self, work: dist.Work) -> None:
        """Wait for a collective of host tensors, in short waits: the watch must be able to end the whole wait."""
        began = time.monotonic()
        check = None
        look = timedelta(seconds=min(POLL_SECONDS, self.timeout / 4))
        while True:
            try:
                work.wait(look)
                return
            except RuntimeError:  # the short wait is over, or the collective has failed
                if work.is_completed():
                    work.wait()  # raises the collective's own error
                    return
            if check is None:  # most waits are over before the first look
                check = TimeoutCheck(self, began)
            check()

    def shutdown(self) -> None:
        if self.owns and not self.is_ended:
            dist.destroy_process_group()
            # gloo's threads drop their last references to Python objects only now; an interpreter that ends
            # meanwhile is aborted ("terminate called without an active exception")
            time.sleep(SETTLE_SECONDS)


def _mpi_rendezvous() -> dict[str, Any]:
    """Return arguments of ``init_process_group`` for ranks that mpirun or srun has started, exchanged over MPI: address
    of rank 0, rank and size. They are empty where torch's own variables are set, or MPI has started no ranks."""
    if "MASTER_ADDR" in os.environ or all(os.environ.get(name, "1") in ("", "1") for name in MPI_SIZES):
        return {}
    try:
        from grace.backends.mpi import MPI
    except ImportError:
        raise missing_extra("mpi4py", "mpi") from None
    comm = MPI.COMM_WORLD
    with contextlib.closing(socket.socket()) as free:
        free.bind(("", 0))
        address = socket.gethostname(), free.getsockname()[1]
    addresses = comm.allgather(address)
    host = "127.0.0.1" if len({name for name, _ in addresses}) == 1 else addresses[0][0]
    url = f"tcp://{host}:{addresses[0][1]}"
    return {"init_method": url, "rank": comm.Get_rank(), "world_size": comm.Get_size()}


def _timeout(group: dist.ProcessGroup | None) -> float | None:
    """Return the seconds that the collectives of a process group may take, which torch does not pass to groups made
    from it; None if torch does not tell them."""
    group = group or dist.group.WORLD
    assert group is not None  # torch.distributed is initialized
    with contextlib.suppress(AttributeError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
    return None


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as bytes, in the same memory, if the engines do not know its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.int16, torch.bool) else tensor
