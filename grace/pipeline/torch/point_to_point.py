"""A stage as the schedules of torch.distributed.pipelining run it, and the schedules. Between stages with unequal
replicas, rows of values are sent."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from grace.exchange.tracing import recorder
from grace.pipeline.torch.mesh import Mesh, Overlap, overlaps

SCHEDULE_CLASSES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
"""Schedules of torch, by their names in plans."""
KINDS = 2
"""Number of kinds of messages: values go forward, gradients back."""
VALUES = 4096
"""Largest number of values between two stages. Their numbers take 12 bits of a message's tag."""
T = TypeVar("T")


@dataclass(frozen=True)
class Crossing:
    """A value that crosses from one stage to the next.

    Attributes:
        name: name of the value's node.
        shape: shape of this rank's rows of the value.
        strides: strides of these rows where the value is computed; None if some of its memory is shared or left out.
        dtype: dtype of the value, and of its gradient.
        differentiable: True if a gradient comes back.
        axis: dimension of the rows; None if all replicas pair up one to one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    axis: int | None = None
    strides: tuple[int, ...] | None = None


@dataclass
class _MicroBatch:
    """The tensors of a micro-batch that are kept from forward to backward: received ``inputs``, and ``outputs`` that
    were sent. Of the last stage the loss is kept, by torch's schedule."""

    inputs: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]
    gradients: list[torch.Tensor | None] = field(default_factory=list)


class PointToPointStage:
    """One stage of one rank, with static shapes. It has the methods that schedules call of a ``PipelineStage``.

    Args:
        module: the stage's module, which is called with received values and the stage's inputs, and returns a tuple.
        mesh: the pipeline's ranks. Only these messages use the mesh's group.
        receives, sends: the values that cross from the previous stage, and to the next one.
        rows: number of this replica's rows of a micro-batch.
        recompute: True to keep only received values and inputs, and compute forward again for backward.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: Mesh,
        receives: Sequence[Crossing],
        sends: Sequence[Crossing],
        rows: int,
        recompute: bool = False,
    ):
        self.submod = module
        self.stage_index = mesh.stage  # the names of these attributes are those that torch's schedules read
        self.num_stages = len(mesh.ranks)
        self.device = mesh.device
        self.has_backward = True
        self.output_chunks: list[tuple[object, ...]] = []
        self.receives = receives
        self.sends = sends
        self.group = mesh.group
        self.recompute = recompute
        near = (mesh.ranks[s] if 0 <= s < self.num_stages else () for s in (mesh.stage - 1, mesh.stage + 1))
        replicas = mesh.replicas[mesh.stage]
        self.sources, self.targets = (overlaps(mesh.replica, replicas, others, rows) for others in near)
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
        self.received_values: dict[int, list[list[torch.Tensor]]] = {}
        self.received_gradients: dict[int, list[list[torch.Tensor]]] = {}
        self.output_chunks.clear()

    # -- set-up, which schedules call once ---------------------------------------------------------------

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return no operations: connections need no set-up."""
        return []

    def _prepare_forward_infra(self, *ignored: object, **keywords: object) -> None:
        """Do nothing: shapes are known."""

    def _prepare_backward_infra(self, *ignored: object, **keywords: object) -> None:
        """Do nothing: shapes of gradients are known."""

    def perform_reduce_grad(self, *ignored: object) -> None:
        """Do nothing: the exchange follows the schedule."""

    # -- messages ----------------------------------------------------------------------------------------

    def _tag(self, stage: int, chunk: int, value: int, kind: int) -> int:
        """Return the tag of a message. Each message of a step has its own."""
        return ((chunk * self.num_stages + stage) * VALUES + value) * KINDS + kind

    def _receive(
        self, values: Sequence[Crossing], peers: Sequence[Overlap], stage: int, chunk: int, kind: int
    ) -> tuple[list[dist.P2POp], list[list[torch.Tensor]]]:
        """Return the receive operations, and the rows of each value from each peer, which they fill."""
        ops = list[dist.P2POp]()
        parts = list[list[torch.Tensor]]()
        for i, value in enumerate(values):
            parts.append([])
            for rank, _, rows in peers:
                shape = list(value.shape)
                if len(peers) > 1:
                    shape[value.axis or 0] = rows
                part = torch.empty(shape, dtype=value.dtype, device=self.device)
                parts[-1].append(part)
                if part.numel():  # neither side starts a message without elements
                    tag = self._tag(stage, chunk, i, kind)
                    ops.append(dist.P2POp(dist.irecv, part, group=self.group, group_peer=rank, tag=tag))
        return ops, parts

    def _send(
        self,
        values: Sequence[Crossing],
        given: Sequence[torch.Tensor | None],
        peers: Sequence[Overlap],
        stage: int,
        chunk: int,
        kind: int,
    ) -> list[dist.P2POp]:
        """Return the send operations for the rows of each value to each peer; torch's schedule posts them."""
        ops = list[dist.P2POp]()
        for i, (value, tensor) in enumerate(zip(values, given, strict=True)):
            if tensor is None:  # no loss depends on it, but the other side awaits a message
                tensor = torch.zeros(value.shape, dtype=value.dtype, device=self.device)
            for rank, first, rows in peers:
                part = tensor.detach() if len(peers) == 1 else tensor.detach().narrow(value.axis or 0, first, rows)
                # a gradient may have another dtype or layout than the value; conjugates are not computed until here
                part = part.to(value.dtype).resolve_conj().resolve_neg().contiguous()
                if part.numel():
                    tag = self._tag(stage, chunk, i, kind)
                    ops.append(dist.P2POp(dist.isend, part, group=self.group, group_peer=rank, tag=tag))
        return ops

    def get_fwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """Return the operations that receive the values of a micro-batch."""
        ops, self.received_values[chunk] = self._receive(self.receives, self.sources, self.stage_index, chunk, 0)
        return ops

    def get_fwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        """Return the operations that send the values of a micro-batch."""
        if self.is_last:
            return []
        outputs = self.chunks[chunk].outputs
        if not self.has_backward:  # else they are needed as roots of backward
            del self.chunks[chunk]
        return self._send(self.sends, outputs, self.targets, self.stage_index + 1, chunk, 0)

    def get_bwd_recv_ops(self, chunk: int) -> list[dist.P2POp]:
        """Return the operations that receive the gradients of a micro-batch."""
        values = _differentiable(self.sends, self.sends)
        ops, self.received_gradients[chunk] = self._receive(values, self.targets, self.stage_index + 1, chunk, 1)
        return ops

    def get_bwd_send_ops(self, chunk: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a micro-batch."""
        gradients = _differentiable(self.receives, self.chunks.pop(chunk).gradients)
        values = _differentiable(self.receives, self.receives)
        return self._send(values, gradients, self.sources, self.stage_index, chunk, 1)

    # -- computation --------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, chunk: int, args: Sequence[object], kwargs: None = None, save_forward_output: bool = True
    ) -> tuple[object, ...]:
        """Run forward of a micro-batch. ``args`` has the model's inputs that the stage reads."""
        received = _concatenate_parts(self.receives, self.received_values.pop(chunk))
        for value, tensor in zip(self.receives, received, strict=True):
            tensor.requires_grad_(value.differentiable and self.has_backward)
        inputs = [*received, *args]
        traced = recorder.phase(f"forward of stage {self.stage_index}", "stage", microbatch=chunk)
        with traced, torch.set_grad_enabled(self.has_backward):
            if self.recompute and self.has_backward:  # buffers keep their values when forward runs again
                outputs = checkpoint(self.submod, *inputs, use_reentrant=False, context_fn=self._contexts_of_forwards)
            else:
                outputs = self.submod(*inputs)
        if self.has_backward or not self.is_last:
            self.chunks[chunk] = _MicroBatch(received, () if self.is_last else outputs)
        if self.is_last and save_forward_output:
            self.output_chunks.append(outputs)
        return outputs

    def _contexts_of_forwards(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts of the first forward, and of the one that backward runs again."""
        return contextlib.nullcontext(), _restoring_buffers(self.submod)

    def backward_one_chunk(self, chunk: int, loss: torch.Tensor | None = None, last_backward: bool = False) -> None:
        """Run backward of a micro-batch."""
        kept = self.chunks[chunk]
        received = _concatenate_parts(_differentiable(self.sends, self.sends), self.received_gradients.pop(chunk))
        roots: list[tuple[torch.Tensor, torch.Tensor | None]] = [(loss, None)] if loss is not None else []
        if loss is None:
            roots += zip(_differentiable(self.sends, kept.outputs), received, strict=True)
        roots = [(output, gradient) for output, gradient in roots if output.requires_grad]
        # the user's autocast may be active, which is for forward alone
        traced = recorder.phase(f"backward of stage {self.stage_index}", "stage", microbatch=chunk)
        with traced, torch.autocast(self.device.type, enabled=False):
            if roots:
                torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
            if loss is not None:
                loss.detach_()  # torch's schedules keep losses, and their graphs would keep received values
        kept.gradients = [one.grad for one in kept.inputs]
        for one in kept.inputs:  # so that gradients are freed once they are sent
            one.grad = None
        kept.outputs = ()  # free activations
        kept.inputs = []


def _differentiable(values: Sequence[Crossing], of_each: Sequence[T]) -> list[T]:
    """Return those of a list with an entry for each value whose value gets a gradient back."""
    return [one for value, one in zip(values, of_each, strict=True) if value.differentiable]


def _concatenate_parts(values: Sequence[Crossing], parts: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return each value, concatenated of the rows from each peer, with its strides: as_strided() depends on them."""
    found = []
    for value, own in zip(values, parts, strict=True):
        whole = own[0] if len(own) == 1 else torch.cat(own, value.axis or 0)
        if value.strides not in (None, whole.stride()):
            whole = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=whole.device).copy_(whole)
        found.append(whole)
    return found


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


def run_schedule(
    name: str,
    stage: PointToPointStage,
    inputs: list[list[object]],
    targets: list[object],
    loss: Callable[[Sequence[object], object], torch.Tensor],
) -> list[torch.Tensor]:
    """Run forward and backward of all micro-batches, by the plan's schedule. Gradients are sums over them. Return the
    losses, of the last stage's outputs and the targets, if this rank has it. ``inputs`` has, for each micro-batch, the
    model's inputs that the stage reads."""
    losses: list[torch.Tensor] = []
    stage.has_backward = True
    stage.clear_runtime_states()
    # made anew for each step, whose loss scale is in the loss function
    schedule = SCHEDULE_CLASSES[name](stage, len(inputs), loss_fn=loss, scale_grads=False)  # type: ignore[arg-type]
    schedule._step_microbatches(inputs, None, targets, losses, return_outputs=False)
    return [one.detach() for one in losses]


def run_forward(stage: PointToPointStage, inputs: list[list[object]]) -> list[tuple[object, ...]]:
    """Run forward of all micro-batches, without gradients. Return the last stage's outputs, for each micro-batch."""
    stage.has_backward = False
    stage.clear_runtime_states()
    sends = []
    for chunk, own in enumerate(inputs):
        for op in stage.get_fwd_recv_ops(chunk):
            op.op(op.tensor, group=op.group, tag=op.tag, group_src=op.group_peer).wait()
        # sends are awaited at the end, so that the next stage computes meanwhile
        stage.forward_one_chunk(chunk, own)
        ops = stage.get_fwd_send_ops(chunk)
        sends += [op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer) for op in ops]
    for work in sends:
        work.wait()
    return list(stage.output_chunks)
