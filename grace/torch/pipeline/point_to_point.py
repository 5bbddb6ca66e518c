"""A stage as the schedules of torch.distributed.pipelining run it. Between stages with unequal replicas, rows of values
are sent."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import _backward as split
from torch.utils.checkpoint import checkpoint

from grace.exchange.tracing import recorder

KINDS = 2
"""Number of kinds of messages: values go forward, gradients back."""
VALUES = 4096
"""Largest number of values between two stages."""


@dataclass(frozen=True)
class Crossing:
    """A value that crosses from one stage to the next.

    Attributes:
        name: name of the value's node.
        shape: shape of this rank's rows of the value.
        dtype: dtype of the value, and of its gradient.
        differentiable: True if a gradient comes back.
        axis: dimension of the rows; None if all replicas pair up one to one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    axis: int | None = None


@dataclass(frozen=True)
class Placement:
    """The ranks of a stage and the replica that this is: replica r of ``len(ranks)`` has rows [r M/R, (r+1) M/R) of
    M."""

    ranks: tuple[int, ...]
    replica: int = 0

    def overlaps(self, other: "Placement", rows: int) -> list[tuple[int, int, int]]:
        """Return the rows that this replica shares with each replica of another stage, as (rank of the other, first
        row, number of rows).

        Args:
            other: placement of the previous or the next stage.
            rows: number of rows of this replica.

        >>> Placement((0,)).overlaps(Placement((1, 2)), 8), Placement((1, 2), 1).overlaps(Placement((0,)), 4)
        ([(1, 0, 4), (2, 4, 4)], [(0, 0, 4)])
        """
        whole = rows * len(self.ranks)
        first = rows * self.replica
        other_rows = whole // len(other.ranks)
        overlaps = []
        for q, rank in enumerate(other.ranks):
            low = max(first, q * other_rows)
            high = min(first + rows, (q + 1) * other_rows)
            if low < high:
                overlaps.append((rank, low - first, high - low))
        return overlaps


@dataclass
class _MicroBatch:
    """The tensors of a micro-batch that are kept from forward to backward."""

    inputs: list[Any]
    outputs: tuple[Any, ...]
    loss: Any = None
    gradients: list[Any] = field(default_factory=list)
    groups: Any = None
    deferred: list[Any] = field(default_factory=list)


class PointToPointStage:
    """One stage of one rank, with static shapes. It has the methods that schedules call of a ``PipelineStage``.

    Args:
        module: the stage's module, which is called with received values and the stage's inputs, and returns a tuple.
        index, count: number of the stage, and number of all stages.
        position, positions: position of this rank among the ranks of a replica, and their number.
        receives, sends: the values that cross from the previous stage, and to the next one.
        placement, before, after: placements of this stage, the previous one and the next one.
        rows: number of this replica's rows of a micro-batch.
        group: process group of all ranks, which only these messages use.
        device: device of the stage.
        recompute: True to keep only received values and inputs, and compute forward again for backward.
        before_communication: a function that is called before anything is sent or awaited. It raises if the ranks are
            about to run different calls.
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
        placement: Placement,
        before: Placement | None,
        after: Placement | None,
        rows: int,
        group: Any,
        device: torch.device,
        recompute: bool = False,
        before_communication: Callable[[], None] | None = None,
    ):
        self.before_communication = before_communication
        self.submod = module  # the names of these attributes are those that torch's schedules read
        self.stage_index = index
        self.num_stages = count
        self.group_rank = position
        self.group_size = positions
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.receives = receives
        self.sends = sends
        self.group = group
        self.device = device
        self.recompute = recompute
        self.sources = [] if before is None else placement.overlaps(before, rows)
        self.targets = [] if after is None else placement.overlaps(after, rows)
        self.has_backward = True
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[Any]] = {}
        self.output_chunks: list[Any] = []
        self.clear_runtime_states()

    @property
    def is_first(self) -> bool:
        """True if no values come from another stage."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """True if this stage computes the loss."""
        return self.stage_index == self.num_stages - 1

    def clear_runtime_states(self) -> None:
        """Discard the micro-batches of the last run."""
        self.chunks: dict[int, _MicroBatch] = {}
        self.received_values: dict[int, list[Any]] = {}
        self.received_gradients: dict[int, list[Any]] = {}
        self.output_chunks.clear()

    # -- set-up, which schedules call once ---------------------------------------------------------------

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """Return no operations: connections need no set-up."""
        return []

    def _prepare_forward_infra(self, *ignored: Any, **keywords: Any) -> None:
        """Do nothing: shapes are known."""

    def _prepare_backward_infra(self, *ignored: Any, **keywords: Any) -> None:
        """Do nothing: shapes of gradients are known."""

    def scale_grads(self, *ignored: Any) -> None:
        """Do nothing: gradients are scaled before the exchange."""

    def perform_reduce_grad(self, *ignored: Any) -> None:
        """Do nothing: the exchange follows the schedule."""

    # -- messages ----------------------------------------------------------------------------------------

    def _tag(self, stage: int, chunk: int, value: int, kind: int) -> int:
        """Return the tag of a message. Each message of a step has its own, since two ranks may share several stages."""
        return ((chunk * self.num_stages + stage) * VALUES + value) * KINDS + kind

    def _receive(self, values: Sequence[Crossing], peers: Any, stage: int, chunk: int, kind: int) -> Any:
        """Return the receive operations, and the parts of each value that they fill; None for values that are not
        sent."""
        if self.before_communication is not None:
            self.before_communication()
        ops = list[dist.P2POp]()
        parts = list[Any]()
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
        """Return the send operations for the parts of each value."""
        if self.before_communication is not None:
            self.before_communication()
        ops = list[dist.P2POp]()
        for i, (value, tensor) in enumerate(zip(values, given, strict=True)):
            if kind and not value.differentiable:
                continue
            if tensor is None:  # no loss depends on it, but the other side awaits a message
                tensor = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            for rank, first, rows in peers:
                part = tensor.detach() if len(peers) == 1 else tensor.detach().narrow(value.axis or 0, first, rows)
                part = part.to(value.dtype).contiguous()
                if part.numel():
                    tag = self._tag(stage, chunk, i, kind)
                    ops.append(dist.P2POp(dist.isend, part, group=self.group, group_peer=rank, tag=tag))
        return ops

    def get_fwd_recv_ops(self, chunk: int) -> list[Any]:
        """Return the operations that receive the values of a micro-batch."""
        if self.is_first:
            return []
        ops, self.received_values[chunk] = self._receive(self.receives, self.sources, self.stage_index, chunk, 0)
        return ops  # type: ignore[no-any-return]

    def get_fwd_send_ops(self, chunk: int) -> list[Any]:
        """Return the operations that send the values of a micro-batch."""
        if self.is_last:
            return []
        outputs = self.chunks[chunk].outputs
        ops = self._send(self.sends, outputs, self.targets, self.stage_index + 1, chunk, 0)
        if not self.has_backward:
            del self.chunks[chunk]
        return ops  # type: ignore[no-any-return]

    def get_bwd_recv_ops(self, chunk: int) -> list[Any]:
        """Return the operations that receive the gradients of a micro-batch."""
        if self.is_last:
            return []
        ops, self.received_gradients[chunk] = self._receive(self.sends, self.targets, self.stage_index + 1, chunk, 1)
        return ops  # type: ignore[no-any-return]

    def get_bwd_send_ops(self, chunk: int) -> list[Any]:
        """Return the operations that send the gradients of a micro-batch."""
        if self.is_first:
            return []
        gradients = self.get_local_bwd_output(chunk)
        return self._send(self.receives, gradients, self.sources, self.stage_index, chunk, 1)  # type: ignore[no-any-return]

    def _concatenate_parts(self, values: Sequence[Crossing], parts: Sequence[Any]) -> list[Any]:
        """Return each value, concatenated of its received parts; None for values that were not sent."""
        tensors: list[Any] = []
        for value, own in zip(values, parts, strict=True):
            if own is None:
                tensors.append(None)
            elif len(own) > 1:
                tensors.append(torch.cat(own, value.axis or 0))
            else:
                tensors.append(own[0])
        return tensors

    # -- two stages of one rank, one after the other -----------------------------------------------------

    def set_local_fwd_input(self, outputs: tuple[Any, ...], chunk: int) -> None:
        """Set the values that the previous stage, which is on this rank too, has computed."""
        self.received_values[chunk] = [[one.detach()] for one in outputs]

    def get_local_bwd_output(self, chunk: int) -> list[Any]:
        """Return the gradients of the received values, and free them."""
        kept = self.chunks[chunk]
        gradients = kept.gradients
        kept.gradients = []
        if kept.groups is None:
            del self.chunks[chunk]
        return gradients

    def set_local_bwd_input(self, gradients: Sequence[Any], chunk: int) -> None:
        """Set the gradients that the next stage, which is on this rank too, has computed."""
        self.received_gradients[chunk] = [None if one is None else [one] for one in gradients]

    # -- computation --------------------------------------------------------------------------------------

    def forward_one_chunk(self, chunk: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
        """Run forward of a micro-batch. ``args`` has the inputs of this rank's stages, by the stages' numbers."""
        received = list[Any]()
        if not self.is_first:
            received = self._concatenate_parts(self.receives, self.received_values.pop(chunk))
            for value, tensor in zip(self.receives, received, strict=True):
                tensor.requires_grad_(value.differentiable and self.has_backward)
        inputs = [*received, *args[self.stage_index]]
        traced = recorder.phase(f"forward of stage {self.stage_index}", "stage", microbatch=chunk)
        with traced, contextlib.nullcontext() if self.has_backward else torch.no_grad():
            outputs = (
                self._checkpointed_forward(inputs) if self.recompute and self.has_backward else self.submod(*inputs)
            )
        if self.has_backward or not self.is_last:
            self.chunks[chunk] = _MicroBatch(received, outputs)
        if self.is_last and save_forward_output:
            self.output_chunks.append(outputs)
        return outputs

    def _checkpointed_forward(self, inputs: list[Any]) -> Any:
        """Run forward so that only its inputs are kept for backward."""
        calls = 0

        def forward(*values: Any) -> Any:
            """Run the module. When forward runs again, for backward, buffers keep their values."""
            nonlocal calls
            calls += 1
            with _restoring_buffers(self.submod) if calls > 1 else contextlib.nullcontext():
                return self.submod(*values)

        return checkpoint(forward, *inputs, use_reentrant=False)

    def _backward_roots(self, chunk: int, loss: Any) -> tuple[list[Any], list[Any] | None]:
        """Return the tensors at which backward begins, and their gradients."""
        if self.is_last:
            return ([loss], None) if loss.requires_grad else ([], None)
        gradients = self._concatenate_parts(self.sends, self.received_gradients.pop(chunk))
        pairs = zip(self.chunks[chunk].outputs, gradients, strict=True)
        ends = [(one, gradient) for one, gradient in pairs if gradient is not None and one.requires_grad]
        return [one for one, _ in ends], [gradient for _, gradient in ends]

    def backward_one_chunk(
        self, chunk: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward of a micro-batch: all of it, or only as far as the received values."""
        kept = self.chunks[chunk]
        ends, gradients = self._backward_roots(chunk, loss)
        wanted = [one for one in kept.inputs if one.requires_grad]
        traced = recorder.phase(f"backward of stage {self.stage_index}", "stage", microbatch=chunk)
        with traced, torch.autocast(self.device.type, enabled=False):
            if full_backward or not wanted or not ends:
                run = lambda: torch.autograd.backward(ends, gradients) if ends else None  # noqa: E731
                if full_backward:
                    run()
                    if self.is_last and loss is not None:
                        loss.detach_()  # torch's schedules keep losses, and their graphs would keep received values
                else:  # no received value needs a gradient: all of the backward pass is for the weights
                    kept.groups = []
                    kept.deferred = [run]
            else:
                self._backward_inputs(kept, ends, gradients, wanted)
        kept.gradients = [one.grad for one in kept.inputs]
        for one in kept.inputs:
            one.grad = None
        kept.outputs = ()  # free activations
        kept.inputs = []
        if kept.groups is None and self.is_first:
            del self.chunks[chunk]

    def _backward_inputs(
        self, kept: _MicroBatch, ends: list[Any], gradients: list[Any] | None, wanted: list[Any]
    ) -> None:
        """Compute the gradients of the received values, as torch's ``stage_backward_input`` does. That function takes
        no views as outputs, and misses parameters whose paths do not meet the received values."""
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

                def save_gradients(grads: Any, group: Any = group, i: int = i) -> None:
                    """Save the gradients that arrive at an intermediate node."""
                    group["grads"][i] = grads

                handles.append(intermediate.register_prehook(save_gradients))
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
            kept.deferred = [lambda: torch.autograd.backward(ends, gradients, retain_graph=True, inputs=left)]

    def backward_weight_one_chunk(self, chunk: int, last_backward: bool = False) -> None:
        """Run the rest of a backward that went only as far as the received values."""
        kept = self.chunks.pop(chunk)
        traced = recorder.phase(f"backward of stage {self.stage_index}'s parameters", "stage", microbatch=chunk)
        with traced, torch.autocast(self.device.type, enabled=False):
            for rest in kept.deferred:
                rest()
            if kept.groups:
                trained = (p for p in self.submod.parameters() if p.requires_grad)
                split.stage_backward_weight(
                    trained, kept.groups, retain_graph=True
                )  # groups may share parts of the graph


@contextlib.contextmanager
def _restoring_buffers(module: torch.nn.Module) -> Iterator[None]:
    """Return a context that restores a module's buffers at its end."""
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
