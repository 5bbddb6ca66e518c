"""A user's own loop over a pipeline: a loss whose backward hands over gradients, and outputs that all ranks get."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.errors import ConfigError
from grace.session.agreement import gather_or_raise
from grace.torch.pipeline.places import Places


class _Loss(torch.autograd.Function):
    """The loss as a value, and the gradients that are handed over when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: torch.Tensor, hand: Callable[[float], None]) -> torch.Tensor:  # type: ignore[override]
        ctx.hand = hand
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.hand(float(gradients[0]))
        return None, None, None


def hand_over(engine: Any, run: Callable[[], Any], later: bool = False) -> Any:
    """Run a schedule beside the gradients that there are, and add its own to them: at once, or when the loss that is
    returned is differentiated, times the gradient that comes in.

    Args:
        engine: whose parameters.
        run: the schedule, which leaves gradients in ``p.grad`` and returns the loss, or what is to be returned for it.
        later: whether ``backward()`` is the caller's.
    """
    parameters = engine.parameters
    before = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        value = run()
        found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        waiting = [{name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in found.items()}]
    finally:
        for name, p in parameters.items():
            p.grad = before[name]

    @torch.no_grad()
    def hand(factor: float) -> None:
        if not waiting:
            raise ConfigError("loss.backward() was called before: a pipeline's loss can be differentiated once")
        for name, gradient in waiting.pop().items():  # which a loss that the program keeps does not keep
            p, own = parameters[name], gradient if factor == 1.0 else gradient * factor
            p.grad = own if p.grad is None else p.grad.add_(own)
        engine.gradients.ready = True
        engine.gradients.handed += 1

    if not later:
        hand(1.0)
        return value
    scale = engine._scale
    anchor = torch.zeros((), requires_grad=True)
    return _Loss.apply(anchor, value, lambda factor: hand(factor / scale))  # type: ignore[no-untyped-call]


def from_rank_0(places: Places, device: torch.device, given: Callable[[], Any]) -> Any:
    """Return rank 0's tensors in place of this rank's, which may be empty. Every rank must call it.

    Args:
        places: of this rank.
        device: where the others' are put.
        given: returns what this rank was given, or raises why that cannot be.

    Raises:
        ConfigError: this rank was given another number of tensors.
        RankError: another rank refused what it was given.
    """
    leaves, spec, error = list[Any](), None, None
    try:
        leaves, spec = pytree.tree_flatten(given())
    except Exception as raised:
        error = raised
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    kinds = [(tuple(t.shape), t.dtype) for t in tensors]
    known = gather_or_raise(places.backend, "a batch", kinds, error, "refused its batch")
    assert spec is not None
    if any(len(one) != len(known[0]) for one in known):
        raise ConfigError("with inputs='rank0' all ranks call with as many tensors; others' may be empty")
    filled = iter(
        places.from_rank(t.contiguous() if places.rank == 0 else torch.empty(shape, dtype=dtype, device=device), 0)
        for t, (shape, dtype) in zip(tensors, known[0], strict=True)
    )
    return pytree.tree_unflatten([next(filled) if isinstance(one, torch.Tensor) else one for one in leaves], spec)


def gathered(outputs: Sequence[Any], places: Places, every: bool, by_replica: bool) -> list[Any]:
    """The flat outputs of all micro-batches as one batch's, on every rank.

    Args:
        outputs: of this rank's micro-batches, where it has the last stage.
        places: of this rank.
        every: of all replicas, in the order of the batch, and not of this rank's replica alone.
        by_replica: whether a batch is that of one replica, and the whole one has them behind one another.
    """
    last = places.ranks[-1]
    every = every or len(set(places.replicas)) > 1
    if places.backend.size == 1:
        known = [outputs]
    else:
        # every rank asks for the outputs of the ranks that it wants, one after the other
        known = [_from(outputs, rank, places) for rank in last]
    wanted = known if every else [known[places.replica]]
    count = len(wanted[0])
    order = (
        [one[i] for one in wanted for i in range(count)]
        if by_replica
        else [one[i] for i in range(count) for one in wanted]
    )
    return [_joined([chunk[place] for chunk in order]) for place in range(len(order[0]))]


def _from(outputs: Sequence[Any], rank: int, places: Places) -> list[Any]:
    """A rank's outputs, on all ranks."""
    mine = places.rank == rank
    kinds = [
        [(tuple(one.shape), one.dtype) if isinstance(one, torch.Tensor) else one for one in chunk] for chunk in outputs
    ]
    told = places.backend.allgather_object(kinds if mine else None)[rank]
    found = []
    for i, chunk in enumerate(told):
        values = []
        for j, kind in enumerate(chunk):
            if not isinstance(kind, tuple) or not isinstance(kind[-1], torch.dtype):
                values.append(kind)
                continue
            tensor = outputs[i][j].contiguous() if mine else torch.empty(kind[0], dtype=kind[1])
            values.append(places.from_rank(tensor, rank))
        found.append(values)
    return found


def _joined(parts: Sequence[Any]) -> Any:
    """Of all micro-batches: rows behind one another; the mean of what has no rows."""
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    if parts[0].ndim:
        return torch.cat(list(parts))
    return torch.stack(list(parts)).float().mean().to(parts[0].dtype)
