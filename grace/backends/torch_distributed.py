"""The torch.distributed backend: any process group, gloo or nccl."""

import contextlib
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from grace.backends.topology import MPI_SIZES
from grace.backends.torch_streams import Side
from grace.backends.torchrun import store_of_this_start
from grace.core.backend import Backend, Handle
from grace.core.channels import Channels
from grace.core.waits import timeout_for
from grace.core.watch import POLL_SECONDS, Patience
from grace.errors import ConfigError, missing_extra

SETTLE_SECONDS = 0.3
DIRECT_BYTES = 1 << 22
"""Of what a rank gets in an all-gather, up to which every rank sends its own to all others at once."""


class TorchBackend(Backend):
    """Collectives of one torch.distributed process group.

    Args:
        group: the process group; the default one if left out.
        owns: destroy the process group on shutdown.
    """

    name = "torch"
    framework = "torch"
    by_ring = True

    def __init__(self, group: Any = None, owns: bool = False):
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized; call grace.init() or init_process_group() first")
        self.group, self.owns = group, owns
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is not a member of the process group")
        self.timeout = timeout_for(_timeout(group))
        self._sides: dict[torch.device, Side | None] = {}
        if os.environ.get("LOCAL_RANK", "").isdigit():  # torchrun's
            self.local_rank = int(os.environ["LOCAL_RANK"])
        if os.environ.get("LOCAL_WORLD_SIZE", "").isdigit():
            self.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        members = [self._global(rank) for rank in range(self.size)]
        same = members == list(range(dist.get_world_size()))
        self.watched, self.members = same and self.size > 1, None if same else members

    @classmethod
    def join(cls) -> "TorchBackend":
        """The default process group, made from the launcher's environment if there is none yet."""
        if dist.is_initialized():
            return cls()
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        seconds = timeout_for()
        ways = _through_mpi() or store_of_this_start(seconds)
        dist.init_process_group(kind, timeout=timedelta(seconds=seconds), **ways)
        return cls(owns=True)

    def describe(self) -> str:
        return f"torch.distributed ({dist.get_backend(self.group)}), rank {self.rank} of {self.size}"

    def allreduce(self, tensor: torch.Tensor) -> Handle:
        self.count(2 * (self.size - 1) / self.size * tensor.nbytes)
        return self._handle(lambda: dist.all_reduce(tensor, group=self.group, async_op=True), tensor, tensor)

    def allgather(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) * tensor.nbytes)
        raw = _known(tensor)
        rows = raw.new_empty((self.size, raw.numel()))
        gathered = list(rows.unbind())
        if self.size > 3 and not raw.is_cuda and rows.nbytes <= DIRECT_BYTES:  # gloo's goes round a ring
            copies = raw.expand(self.size, -1).contiguous()
            begin = lambda: dist.all_to_all_single(rows, copies, group=self.group, async_op=True)  # noqa: E731
        else:
            begin = lambda: dist.all_gather(gathered, raw, group=self.group, async_op=True)  # noqa: E731
        return self._handle(begin, [part.view(tensor.dtype) for part in gathered], tensor)

    def alltoall(self, tensor: torch.Tensor) -> Handle:
        self.count((self.size - 1) / self.size * tensor.nbytes)
        received = torch.empty_like(tensor)
        begin = lambda: dist.all_to_all_single(_known(received), _known(tensor), group=self.group, async_op=True)  # noqa: E731
        return self._handle(begin, list(received.view(self.size, -1).unbind()), tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Handle:
        if root == self.rank:
            self.count((self.size - 1) * tensor.nbytes)
        begin = lambda: dist.broadcast(_known(tensor), self._global(root), group=self.group, async_op=True)  # noqa: E731
        return self._handle(begin, tensor, tensor)

    def gather(self, tensor: torch.Tensor, root: int) -> Handle:
        raw, gathered = _known(tensor), list[torch.Tensor]()
        if root == self.rank:
            gathered = list(raw.new_empty((self.size, raw.numel())).unbind())
        else:
            self.count(tensor.nbytes)
        begin = lambda: dist.gather(raw, gathered or None, self._global(root), group=self.group, async_op=True)  # noqa: E731
        return self._handle(begin, [part.view(tensor.dtype) for part in gathered], tensor)

    def duplicate(self) -> "TorchBackend":
        return self.copy_with(group=self._new(range(self.size)), owns=False)

    def split(self, ranks: Sequence[int]) -> "TorchBackend | None":
        group = self._new(ranks)
        if self.rank not in ranks:
            return None
        made = TorchBackend(group)
        made.timeout = self.timeout
        return made

    @property
    def channels(self) -> Channels:
        """Those over the same ranks, which all backends of one process group share; they end when it does."""
        return self._channels_of.setdefault(self.group or dist.group.WORLD, Channels())

    _channels_of: ClassVar[weakref.WeakKeyDictionary[Any, Channels]] = weakref.WeakKeyDictionary()

    def _new(self, ranks: Sequence[int]) -> Any:
        """A process group of some of the ranks, which all of them make together."""
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
        usual = c10d._process_group_name
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
            c10d._process_group_name = usual

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def allgather_object(self, value: Any) -> list[Any]:
        with self.checked_operation("allgather_object"):
            return self.allgather_pickled(value)

    def tensor_of(self, array: Any) -> torch.Tensor:
        group: Any = self.group or dist.group.WORLD
        cpu = torch.device("cpu") in group._device_types
        return torch.tensor(array, device="cpu" if cpu else torch.cuda.current_device())

    def _side(self, device: torch.device) -> Side | None:
        """The stream that a GPU's collectives start on; None over engines that have none of their own."""
        if device not in self._sides:
            group: Any = self.group or dist.group.WORLD
            self._sides[device] = Side(device) if "nccl" in group._get_backend(device).name() else None
        return self._sides[device]

    def _handle(self, begin: Callable[[], Any], result: Any, sent: torch.Tensor) -> Handle:
        """The collective that ``begin`` starts; on a GPU ``wait()`` only lets later work on it wait."""
        side = self._side(sent.device) if sent.is_cuda else None
        if side is not None:
            begun = side.start(begin, [sent, *(result if isinstance(result, list) else [result])])
            return Handle(lambda: side.join(begun), result, (begun,))
        work = begin()
        if sent.is_cuda:
            return Handle(work.wait, result, (work,))

        def wait() -> None:
            began, patience = time.monotonic(), None
            look = timedelta(seconds=min(POLL_SECONDS, self.timeout / 4))
            while True:
                try:
                    work.wait(look)
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # raises what it failed of
                        return
                if patience is None:  # most waits are over before the first look
                    patience = Patience(self, began)
                patience()

        return Handle(wait, result, (work,))

    def shutdown(self) -> None:
        if self.owns and dist.is_initialized():
            dist.destroy_process_group()
            # gloo's threads drop their last references to Python objects only now; an interpreter that ends
            # meanwhile is aborted ("terminate called without an active exception")
            time.sleep(SETTLE_SECONDS)


def _through_mpi() -> dict[str, Any]:
    """Where ranks meet that mpirun or srun has started, as MPI tells them; nothing where torch's own variables say so.

    Raises:
        MissingExtraError: mpi4py is not installed.
    """
    if "MASTER_ADDR" in os.environ or all(os.environ.get(name, "1") in ("", "1") for name in MPI_SIZES):
        return {}
    try:
        from grace.backends.mpi import MPI
    except ImportError:
        raise missing_extra("mpi4py", "mpi") from None
    comm = MPI.COMM_WORLD
    with contextlib.closing(socket.socket()) as free:
        free.bind(("", 0))
        here = socket.gethostname(), free.getsockname()[1]
    hosts = comm.allgather(here)
    host = "127.0.0.1" if len({name for name, _ in hosts}) == 1 else hosts[0][0]
    where = f"tcp://{host}:{hosts[0][1]}"
    return {"init_method": where, "rank": comm.Get_rank(), "world_size": comm.Get_size()}


def _timeout(group: Any) -> float | None:
    """Seconds that the collectives of a process group may take, which torch does not hand on to others; None if it
    does not tell."""
    group = group or dist.group.WORLD
    with contextlib.suppress(AttributeError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
    return None


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes if the engines have no such numbers; the memory is the same."""
    return tensor.view(torch.uint8) if tensor.dtype in (torch.int16, torch.bool) else tensor
