"""A user's own loop over a pipeline: a loss whose backward delivers gradients, and outputs that all ranks get."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.pipeline.torch.mesh import Mesh
from grace.session.agreement import gather_or_raise


class _Loss(torch.autograd.Function):
    """The loss as a value. Differentiating it delivers the gradients that were computed with it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, deliver: Callable[[float], None]) -> torch.Tensor:  # type: ignore[override]
        ctx.deliver = deliver
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.deliver(float(gradients[0]))
        return None, None, None


def accumulate_gradients(engine: Any, run: Callable[[], Any], later: bool = False) -> Any:
    """Run a schedule while ``p.grad`` is empty, then add its gradients to the former ones: at once, or when the
    returned loss is differentiated, times the incoming gradient.

    Args:
        engine: the pipeline.
        run: a function that runs the schedule, leaves gradients in ``p.grad``, and returns the value to return.
        later: True if the caller calls ``backward()`` of the returned loss.
    """
    parameters = engine.parameters
    former = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        value = run()
        computed = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        pending = [{name: g.to_dense() if g.is_sparse else g for name, g in computed.items()}]
    finally:
        for name, p in parameters.items():
            p.grad = former[name]

    @torch.no_grad()
    def deliver(factor: float) -> None:
        """Add the schedule's gradients, times a factor, to ``p.grad``."""
        if not pending:
            raise ConfigError("loss.backward() was called before: a pipeline's loss can be differentiated once")
        for name, gradient in pending.pop().items():  # popped, so that a loss that the program keeps frees them
            p = parameters[name]
            scaled = gradient if factor == 1.0 else gradient * factor
            p.grad = scaled if p.grad is None else p.grad.add_(scaled)
        engine.gradients.ready = True
        engine.gradients.batches += 1

    if not later:
        deliver(1.0)
        return value
    scale = engine._scale
    anchor = torch.zeros((), requires_grad=True)
    return _Loss.apply(anchor, value, lambda factor: deliver(factor / scale))  # type: ignore[no-untyped-call]


def broadcast_batch(mesh: Mesh, device: torch.device, given: Callable[[], Any]) -> Any:
    """Return rank 0's tensors in place of this rank's, which may be empty. Every rank must call it.

    Args:
        mesh: the pipeline's ranks.
        device: device of the tensors on the other ranks.
        given: a function that returns this rank's arguments, or raises if they cannot work.

    Raises:
        ConfigError: this rank was given another number of tensors.
        RankError: another rank refused its arguments.
    """
    leaves = list[Any]()
    spec, error = None, None
    try:
        leaves, spec = pytree.tree_flatten(given())
    except Exception as raised:
        error = raised
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    kinds = [(tuple(t.shape), t.dtype) for t in tensors]
    known = gather_or_raise(mesh.backend, "a batch", kinds, error, "refused its batch")
    assert spec is not None
    if any(len(one) != len(known[0]) for one in known):
        raise ConfigError("with inputs='rank0' all ranks call with as many tensors; others' may be empty")
    filled = iter(
        mesh.broadcast(t.contiguous() if mesh.rank == 0 else torch.empty(shape, dtype=dtype, device=device), 0)
        for t, (shape, dtype) in zip(tensors, known[0], strict=True)
    )
    return pytree.tree_unflatten([next(filled) if isinstance(one, torch.Tensor) else one for one in leaves], spec)


def gather_outputs(outputs: Sequence[Any], mesh: Mesh, every: bool, by_replica: bool) -> list[Any]:
    """Gather the flat outputs of all micro-batches as those of one batch, on every rank.

    Args:
        outputs: outputs of this rank's micro-batches, if it has the last stage.
        mesh: the pipeline's ranks.
        every: True for the outputs of all replicas, in the order of the batch, instead of this rank's replica.
        by_replica: True if each replica has a batch of its own, and the whole batch is their concatenation.
    """
    last = mesh.ranks[-1]
    every = every or len(set(mesh.replicas)) > 1
    if mesh.backend.size == 1:
        known = [outputs]
    else:
        # broadcasts are collectives: every rank takes part in those of all replicas, one after the other
        known = [_broadcast_outputs(outputs, rank, mesh) for rank in last]
    wanted = known if every else [known[mesh.replica]]
    count = len(wanted[0])
    order = (
        [one[i] for one in wanted for i in range(count)]
        if by_replica
        else [one[i] for i in range(count) for one in wanted]
    )
    return [_concatenate([chunk[i] for chunk in order]) for i in range(len(order[0]))]


def _broadcast_outputs(outputs: Sequence[Any], rank: int, mesh: Mesh) -> list[Any]:
    """Return a rank's outputs, on all ranks."""
    is_source = mesh.rank == rank
    kinds = [
        [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in chunk] for chunk in outputs
    ]
    received = mesh.backend.allgather_object(kinds if is_source else None)[rank]
    all_outputs = []
    for i, chunk in enumerate(received):
        values = []
        for j, kind in enumerate(chunk):
            if not isinstance(kind, tuple) or not isinstance(kind[-1], torch.dtype):
                values.append(kind)
                continue
            tensor = outputs[i][j].contiguous() if is_source else torch.empty(kind[0], dtype=kind[1])
            values.append(mesh.broadcast(tensor, rank))
        all_outputs.append(values)
    return all_outputs


def _concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of all micro-batches; average values that have no rows."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if parts[0].ndim:
        return torch.cat(list(parts))
    return torch.stack(list(parts)).float().mean().to(parts[0].dtype)
