"""Horovod's operations on torch tensors, over every engine: uncompressed, and compared among ranks before they
begin."""

from collections.abc import Sequence
from typing import Any

import torch

from grace.backends.object_collectives import chosen_root, compared, engine_for, named
from grace.core.backend import Backend
from grace.errors import ConfigError
from grace.session.settings import reduction

SUMMED = (torch.float32, torch.float64, torch.int32, torch.int64)
"""Dtypes that every engine sums; all others are converted to wider ones."""


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: str | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Average, or sum, a tensor over all ranks. Every rank must call it.

    Args:
        tensor: a dense tensor of any shape, of floats or whole numbers; the same shape and dtype on every rank. It is
            not changed.
        average: Horovod's former name of ``op``.
        name: for messages; the same on every rank.
        op: ``grace.Average``, the default, or ``grace.Sum`` (or Horovod's constants).
        prescale_factor, postscale_factor: factors of the tensor, and of the result.

    Returns:
        A new tensor of that shape, dtype and device, the same bits on every rank. 16-bit floats are summed in float32.
        Averages of whole numbers are rounded down, as Horovod's. Gradients flow through it.

    Raises:
        ConfigError: the tensor, or ``op``, cannot work.
        RankError: other ranks call something else, or with another shape or dtype; nothing was exchanged.

    >>> import grace
    >>> backend = grace.init("local")
    >>> grace.allreduce(torch.tensor([1.0, 2.0]), op=grace.Sum)
    tensor([1., 2.])
    >>> grace.shutdown()
    """
    backend = engine_for("torch")
    with compared(backend, "allreduce", lambda: _described_sum(tensor, average, name, op), True):
        reduced: torch.Tensor = _AllReduce.apply(_scaled(tensor, prescale_factor), reduction(op, average), backend)
    return _scaled(reduced, postscale_factor)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate all ranks' tensors along their first dimension. Every rank must call it.

    Args:
        tensor: a dense tensor of any dtype; ranks may differ in the first dimension alone. One number counts as a row.
        name: for messages; the same on every rank.

    Returns:
        A new tensor of that dtype and device, whose rows are the ranks' in their order. Gradients flow through it.

    Raises:
        ConfigError: the tensor is sparse, or of the meta device.
        RankError: other ranks call something else, or with other rows or another dtype; nothing was exchanged.

    >>> import grace
    >>> backend = grace.init("local")
    >>> grace.allgather(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2])
    >>> grace.shutdown()
    """
    backend = engine_for("torch")
    with compared(backend, "allgather", lambda: _described(tensor, name, rows=True), True):
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        # ranks may have different numbers of rows, and an all-gather needs them in advance
        counts: list[int] = backend.allgather_object(rows.shape[0])
        gathered: torch.Tensor = _AllGather.apply(rows, counts, backend)
    return gathered


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Give every rank the root's tensor. Every rank must call it.

    Args:
        tensor: a dense tensor of any shape and dtype, the same ones on every rank. It is not changed.
        root_rank: the rank whose values count.
        name: for messages; the same on every rank.

    Returns:
        A new tensor of that shape, dtype and device. Gradients flow back to the root.

    Raises:
        ConfigError: the tensor is sparse, or of the meta device, or ``root_rank`` is no rank.
        RankError: other ranks call something else, or with another shape, dtype or root; nothing was exchanged.

    >>> import grace
    >>> backend = grace.init("local")
    >>> grace.broadcast(torch.tensor(3), root_rank=0).item()
    3
    >>> grace.shutdown()
    """
    backend = engine_for("torch")

    def describe() -> str:
        """Return the description that the ranks compare."""
        return f"{_described(tensor, name)} from rank {chosen_root(0, root_rank, backend.size)}"

    with compared(backend, "broadcast", describe, True):
        received: torch.Tensor = _Broadcast.apply(tensor, root_rank, backend)
    return received


class _AllReduce(torch.autograd.Function):
    """The mean or the sum over ranks. Its gradient is reduced by the same operation, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: str, backend: Backend) -> torch.Tensor:
        ctx.op = op
        ctx.backend = backend
        return _reduced(tensor, op, backend)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return _gradient(gradient, ctx.op, ctx.backend), None, None


class _AllGather(torch.autograd.Function):
    """The rows of all ranks. The gradient of a rank's rows is the mean over ranks, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, counts: Sequence[int], backend: Backend) -> torch.Tensor:
        ctx.counts = counts
        ctx.backend = backend
        return _gathered(rows, counts, backend)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        rank = ctx.backend.rank
        counts = ctx.counts
        mean = _gradient(gradient, "average", ctx.backend)
        return mean.narrow(0, sum(counts[:rank]), counts[rank]), None, None


class _Broadcast(torch.autograd.Function):
    """The root's tensor. The root's gradient is the mean over ranks, as in Horovod; all other gradients are zero."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, backend: Backend) -> torch.Tensor:
        ctx.root = root
        ctx.backend = backend
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        if sent.numel():
            backend.broadcast(_raw(sent), root).wait()
        return sent

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        mean = _gradient(gradient, "average", ctx.backend)
        return mean if ctx.backend.rank == ctx.root else torch.zeros_like(mean), None, None


def _reduced(tensor: torch.Tensor, op: str, backend: Backend) -> torch.Tensor:
    """Return the sum or the mean of all ranks' tensors."""
    is_integer = not tensor.dtype.is_floating_point
    wide_dtype = torch.int64 if is_integer else torch.float32
    dtype = tensor.dtype if tensor.dtype in SUMMED else wide_dtype
    total = tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)
    if total.numel():
        total = backend.allreduce(total.view(-1)).wait().view(tensor.shape)
    if op == "average" and backend.size > 1:
        total = total.floor_divide_(backend.size) if is_integer else total.div_(backend.size)
    return total.to(tensor.dtype)


def _gradient(gradient: torch.Tensor, op: str, backend: Backend) -> torch.Tensor:
    """Reduce a gradient in backward. All ranks must call it."""
    with compared(backend, "gradient of a collective", lambda: f"{_described(gradient, None)} ({op})", True):
        return _reduced(gradient, op, backend)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a factor, in the tensor's dtype."""
    return tensor if factor == 1 else (tensor * factor).to(tensor.dtype)


def _gathered(rows: torch.Tensor, counts: Sequence[int], backend: Backend) -> torch.Tensor:
    """Return the rows of all ranks, in the order of ranks."""
    gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
    width = gathered[:1].nbytes if sum(counts) else 0
    if width:
        padded = rows.new_empty((max(counts), *rows.shape[1:]))  # an all-gather takes as many bytes of every rank
        padded[: rows.shape[0]] = rows.detach()
        parts = backend.allgather(_raw(padded)).wait()
        torch.cat([part[: count * width] for part, count in zip(parts, counts, strict=True)], out=_raw(gathered))
    return gathered


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, since engines do not support every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _described(tensor: torch.Tensor, name: str | None, rows: bool = False) -> str:
    """Return a description of a tensor that must be the same on all ranks.

    Args:
        rows: True to leave out the first dimension, in which ranks may differ.

    Raises:
        ConfigError: it is not a tensor that can be sent.
    """
    if not isinstance(tensor, torch.Tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise ConfigError(f"it takes a tensor, not an object of {kind}: torch.tensor(value)")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise ConfigError("it takes a dense tensor with values, and this one is sparse, nested or of the meta device")
    if hasattr(tensor, "device_mesh"):
        raise ConfigError("it takes a whole tensor, and this one is a DTensor: give its to_local() or full_tensor()")
    shape = ["any number", *map(str, tensor.shape[1:])] if rows else list(map(str, tensor.shape))
    return f"of {str(tensor.dtype).removeprefix('torch.')}[{', '.join(shape)}]{named(name)}"


def _described_sum(tensor: torch.Tensor, average: bool | None, name: str | None, op: str | int | None) -> str:
    """Return a description of a tensor and a reduction that must be the same on all ranks."""
    described = _described(tensor, name)
    if tensor.dtype is torch.bool or tensor.dtype.is_complex:
        raise ConfigError(
            f"it does not sum {tensor.dtype}: give tensor.int() for bools, torch.view_as_real() for complex"
        )
    return f"{described} ({reduction(op, average)})"
