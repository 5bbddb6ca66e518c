"""A stage as the schedules of torch.distributed.pipelining run it; between unequal replicas rows of values travel."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import _backward as split
from torch.utils.checkpoint import checkpoint

from grace.exchange.tracing import recorder

KINDS, VALUES = 2, 4096
"""Values go forward, gradients back; and at most so many between two stages."""


@dataclass(frozen=True)
class Crossing:
    """A value that crosses from one stage to the next.

    Attributes:
        name: its node's.
        shape: for the rows of the rank that holds this.
        dtype: of the value, and of its gradient.
        differentiable: whether a gradient comes back.
        axis: where the rows are; None where all replicas pair up one to one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    axis: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a stage's ranks stand: replica r of ``len(ranks)`` has rows [r M/R, (r+1) M/R) of M."""

    ranks: tuple[int, ...]
    replica: int = 0

    def overlaps(self, other: "Place", rows: int) -> list[tuple[int, int, int]]:
        """(rank of the other's, first row, rows) of the rows that this replica shares with each of the other's.

        Args:
            other: the stage before or after.
            rows: of this replica.

        >>> Place((0,)).overlaps(Place((1, 2)), 8), Place((1, 2), 1).overlaps(Place((0,)), 4)
        ([(1, 0, 4), (2, 4, 4)], [(0, 0, 4)])
        """
        whole = rows * len(self.ranks)
        first, theirs = rows * self.replica, whole // len(other.ranks)
        found = []
        for q, rank in enumerate(other.ranks):
            low, high = max(first, q * theirs), min(first + rows, (q + 1) * theirs)
            if low < high:
                found.append((rank, low - first, high - low))
        return found


@dataclass
class _Chunk:
    """What is kept of a micro-batch from forward to backward."""

    inputs: list[Any]
    outputs: tuple[Any, ...]
    loss: Any = None
    gradients: list[Any] = field(default_factory=list)
    groups: Any = None
    missing: list[Any] = field(default_factory=list)


class PointToPointStage:
    """One stage of one rank, with static shapes; has what schedules ask of a ``PipelineStage``.

    Args:
        module: called with received values and the stage's inputs; returns a tuple.
        index, count: the stage's number, and how many there are.
        position, positions: of this rank among those of a pipeline, and how many these are.
        receives, sends: what crosses before and behind.
        place, before, behind: where the ranks of this stage stand, and of its neighbours.
        rows: of a micro-batch, this replica's.
        group: all ranks, for nothing but this.
        device: where the stage is.
        recompute: keep only what comes in, and compute forward again for backward.
        before_travel: called before anything is sent or awaited; it raises if the ranks are to run different things.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        index: int,
        count: int,
        position: int,
        positions: int,
        receives: Sequence[Crossing],
        sends: Sequence[Crossing],
        place: Place,
        before: Place | None,
        behind: Place | None,
        rows: int,
        group: Any,
        device: torch.device,
        recompute: bool = False,
        before_travel: Callable[[], None] | None = None,
    ):
        self.before_travel = before_travel
        self.submod, self.stage_index, self.num_stages = module, index, count
        self.group_rank, self.group_size = position, positions
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.receives, self.sends, self.group, self.device, self.recompute = receives, sends, group, device, recompute
        self.sources = [] if before is None else place.overlaps(before, rows)
        self.targets = [] if behind is None else place.overlaps(behind, rows)
        self.has_backward = True
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self.output_chunks: list[Any] = []
        self.clear_runtime_states()

    @property
    def is_first(self) -> bool:
        """Whether values come from no other stage."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is here."""
        return self.stage_index == self.num_stages - 1

    def clear_runtime_states(self) -> None:
        """Forget micro-batches."""
        self.chunks: dict[int, _Chunk] = {}
        self.arriving: dict[int, list[Any]] = {}
        self.returning: dict[int, list[Any]] = {}
        self.output_chunks.clear()

    # -- what schedules ask for once ---------------------------------------------------------------------

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        return []

    def _prepare_forward_infra(self, *ignored: Any, **keywords: Any) -> None:
        """Shapes are known."""

    def _prepare_backward_infra(self, *ignored: Any, **keywords: Any) -> None:
        """They are of gradients too."""

    def scale_grads(self, *ignored: Any) -> None:
        """Done before the exchange."""

    def perform_reduce_grad(self, *ignored: Any) -> None:
        """The exchange follows the schedule."""

    # -- what travels ------------------------------------------------------------------------------------

    def _tag(self, stage: int, chunk: int, value: int, kind: int) -> int:
        """One for each message of a step, since two ranks may share several stages."""
        return ((chunk * self.num_stages + stage) * VALUES + value) * KINDS + kind

    def _receive(self, values: Sequence[Crossing], peers: Any, stage: int, chunk: int, kind: int) -> Any:
        """Operations, and the parts of each value that they fill; None for values that do not come."""
        if self.before_travel is not None:
            self.before_travel()
        ops, parts = list[dist.P2POp](), list[Any]()
        for i, value in enumerate(values):
            if kind and not value.differentiable:
                parts.append(None)
                continue
            own = []
            for rank, _, rows in peers:
                shape = list(value.shape)
                if len(peers) > 1:
                    shape[value.axis or 0] = rows
                own.append(torch.empty(shape, dtype=value.dtype, device=self.device))
                if own[-1].numel():
                    tag = self._tag(stage, chunk, i, kind)
                    ops.append(dist.P2POp(dist.irecv, own[-1], group=self.group, group_peer=rank, tag=tag))
            parts.append(own)
        return ops, parts

    def _send(
        self, values: Sequence[Crossing], given: Sequence[Any], peers: Any, stage: int, chunk: int, kind: int
    ) -> Any:
        if self.before_travel is not None:
            self.before_travel()
        ops = list[dist.P2POp]()
        for i, (value, tensor) in enumerate(zip(values, given, strict=True)):
            if kind and not value.differentiable:
                continue
            if tensor is None:  # nothing depends on it
                tensor = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            for rank, first, rows in peers:
                part = tensor.detach() if len(peers) == 1 else tensor.detach().narrow(value.axis or 0, first, rows)
                part = part.to(value.dtype).contiguous()
                if part.numel():
                    tag = self._tag(stage, chunk, i, kind)
                    ops.append(dist.P2POp(dist.isend, part, group=self.group, group_peer=rank, tag=tag))
        return ops

    def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
        """Of the values of a micro-batch."""
        if self.is_first:
            return []
        ops, self.arriving[chunk] = self._receive(self.receives, self.sources, self.stage_index, chunk, 0)
        return ops  # type: ignore[no-any-return]

    def get_fwd_send_ops(self, chunk: int) -> list[Any]:
        """Of the values of a micro-batch."""
        if self.is_last:
            return []
        outputs = self.chunks[chunk].outputs
        ops = self._send(self.sends, outputs, self.targets, self.stage_index + 1, chunk, 0)
        if not self.has_backward:
            del self.chunks[chunk]
        return ops  # type: ignore[no-any-return]

    def get_bwd_recv_ops(self, chunk: int) -> list[Any]:
        """Of the gradients of a micro-batch."""
        if self.is_last:
            return []
        ops, self.returning[chunk] = self._receive(self.sends, self.targets, self.stage_index + 1, chunk, 1)
        return ops  # type: ignore[no-any-return]

    def get_bwd_send_ops(self, chunk: int) -> list[Any]:
        """Of the gradients of a micro-batch."""
        if self.is_first:
            return []
        gradients = self.get_local_bwd_output(chunk)
        return self._send(self.receives, gradients, self.sources, self.stage_index, chunk, 1)  # type: ignore[no-any-return]

    def _whole(self, values: Sequence[Crossing], parts: Sequence[Any]) -> list[Any]:
        whole = []
        for value, own in zip(values, parts, strict=True):
            whole.append(own if own is None or len(own) > 1 else own[0])
            if own is not None and len(own) > 1:
                whole[-1] = torch.cat(own, value.axis or 0)
        return whole

    # -- two stages of one rank, one behind the other -----------------------------------------------------

    def set_local_fwd_input(self, outputs: tuple[Any, ...], chunk: int) -> None:
        """The stage before, on this rank, has computed these."""
        self.arriving[chunk] = [[one.detach()] for one in outputs]

    def get_local_bwd_output(self, chunk: int) -> list[Any]:
        """The gradients of what was received, which are handed over."""
        kept = self.chunks[chunk]
        gradients, kept.gradients = kept.gradients, []
        if kept.groups is None:
            del self.chunks[chunk]
        return gradients

    def set_local_bwd_input(self, gradients: Sequence[Any], chunk: int) -> None:
        """The stage behind, on this rank, has computed these."""
        self.returning[chunk] = [None if one is None else [one] for one in gradients]

    # -- computation --------------------------------------------------------------------------------------

    def forward_one_chunk(self, chunk: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        """Forward of a micro-batch; ``args`` are this stage's inputs, of all its stages in a dict by number."""
        received = list[Any]()
        if not self.is_first:
            received = self._whole(self.receives, self.arriving.pop(chunk))
            for value, tensor in zip(self.receives, received, strict=True):
                tensor.requires_grad_(value.differentiable and self.has_backward)
        inputs = [*received, *args[self.stage_index]]
        traced = recorder.phase(f"forward of stage {self.stage_index}", "stage", microbatch=chunk)
        with traced, contextlib.nullcontext() if self.has_backward else torch.no_grad():
            outputs = self._again(inputs) if self.recompute and self.has_backward else self.submod(*inputs)
        if self.has_backward or not self.is_last:
            self.chunks[chunk] = _Chunk(received, outputs)
        if self.is_last and save_forward_output:
            self.output_chunks.append(outputs)
        return outputs

    def _again(self, inputs: list[Any]) -> Any:
        """Forward that keeps only its inputs."""
        calls = 0

        def forward(*values: Any) -> Any:
            nonlocal calls
            calls += 1
            with _unchanged(self.submod) if calls > 1 else contextlib.nullcontext():
                return self.submod(*values)

        return checkpoint(forward, *inputs, use_reentrant=False)

    def _ends(self, chunk: int, loss: Any) -> tuple[list[Any], list[Any] | None]:
        """The tensors that backward begins at, and their gradients."""
        if self.is_last:
            return ([loss], None) if loss.requires_grad else ([], None)
        gradients = self._whole(self.sends, self.returning.pop(chunk))
        pairs = zip(self.chunks[chunk].outputs, gradients, strict=True)
        ends = [(one, gradient) for one, gradient in pairs if gradient is not None and one.requires_grad]
        return [one for one, _ in ends], [gradient for _, gradient in ends]

    def backward_one_chunk(
        self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward of a micro-batch: whole, or only as far as what was received."""
        kept = self.chunks[chunk]
        ends, gradients = self._ends(chunk, loss)
        wanted = [one for one in kept.inputs if one.requires_grad]
        traced = recorder.phase(f"backward of stage {self.stage_index}", "stage", microbatch=chunk)
        with traced, torch.autocast(self.device.type, enabled=False):
            if full_backward or not wanted or not ends:
                whole = lambda: torch.autograd.backward(ends, gradients) if ends else None  # noqa: E731
                if full_backward:
                    whole()
                    if self.is_last and loss is not None:
                        loss.detach_()  # torch's schedules keep losses, whose graphs keep what was received
                else:  # nothing to hand over: all of it is the weights'
                    kept.groups, kept.missing = [], [whole]
            else:
                self._inputs_only(kept, ends, gradients, wanted)
        kept.gradients = [one.grad for one in kept.inputs]
        for one in kept.inputs:
            one.grad = None
        kept.outputs, kept.inputs = (), []
        if kept.groups is None and self.is_first:
            del self.chunks[chunk]

    def _inputs_only(self, kept: _Chunk, ends: list[Any], gradients: list[Any] | None, wanted: list[Any]) -> None:
        """As torch's ``stage_backward_input``, which takes no views for outputs and forgets parameters that do not meet
        what was received."""
        node = split._get_grad_fn_or_grad_acc
        edges = split.construct_reverse_graph([fn for fn in map(node, ends) if fn is not None])
        parameters = [p for p in self.submod.parameters() if p.requires_grad]
        weights = {node(p): p for p in parameters}
        groups = split.get_param_groups([fn for fn in map(node, wanted) if fn], list(weights), edges)  # type: ignore
        groups = [group for group in groups if group["intermediates"]]
        handles = []
        for group in groups:
            group["intermediates"] = list(group["intermediates"])
            group["grads"] = [None] * len(group["intermediates"])
            for i, intermediate in enumerate(group["intermediates"]):

                def keep(grads: Any, group: Any = group, i: int = i) -> None:
                    group["grads"][i] = grads

                handles.append(intermediate.register_prehook(keep))
        try:
            found = torch.autograd.grad(ends, wanted, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for one, gradient in zip(wanted, found, strict=True):
            one.grad = gradient
        met = set().union(*(group["params"] for group in groups))
        left = [p for fn, p in weights.items() if fn in edges and fn not in met]
        kept.groups = groups
        if left:
            kept.missing = [lambda: torch.autograd.backward(ends, gradients, retain_graph=True, inputs=left)]

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """The rest of a backward that went only as far as what was received."""
        kept = self.chunks.pop(chunk)
        traced = recorder.phase(f"backward of stage {self.stage_index}'s parameters", "stage", microbatch=chunk)
        with traced, torch.autocast(self.device.type, enabled=False):
            for rest in kept.missing:
                rest()
            if kept.groups:
                trained = (p for p in self.submod.parameters() if p.requires_grad)
                split.stage_backward_weight(trained, kept.groups, retain_graph=True)  # groups may share what they read


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Buffers that are written when forward is computed again are what they were."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
