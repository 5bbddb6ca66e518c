"""Adapters and checks for users' parts, written to the original GRACE's contract (grace_dl) or to Grace's.

They wrap the methods that a class defines, so that the exchange, memories and users' own calls behave alike, and
validate what a user's method returns: its type, and the shape that payloads decode to. Whether payloads keep their
sizes is checked where they are packed (:mod:`grace.exchange.codec`), and between ranks in
:mod:`grace.exchange.round_trip`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from grace.errors import ConfigError, PayloadError, payload_of
from grace.kernels import kernels_of
from grace.kernels.constants import FLOATS, ITEM_SIZE
from grace.kernels.reference import Tensor

INPUT = "which may be the gradient itself, or be needed again: compute with a copy, as tensor.clone()"


def _changes(tensor: Tensor) -> int | None:
    """Return the number of changes in place that torch has counted; None if it counts none."""
    try:
        return getattr(tensor, "_version", None)
    except RuntimeError:  # tensors that were made in inference mode
        return None


def wrap_compensate(compensate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a user's ``compensate(tensor, name)``, to check what it returns, and that it leaves the gradient as it is.

    Raises:
        ConfigError: it changed the gradient, or returned no tensor of its shape; the message names the variable.
    """

    @functools.wraps(compensate)
    def compensated(self: Any, tensor: Tensor, name: str) -> Tensor:
        before = _changes(tensor)
        given = compensate(self, tensor, name)
        if _changes(tensor) != before:
            raise self.error(f"compensate() changed its input for {name!r}, {INPUT}")
        try:
            return check_shape(given, tensor, "compensate()")
        except PayloadError as error:
            raise self.error(f"{error} for {name!r}") from None

    return compensated


def wrap_compress(
    compress: Callable[..., tuple[list[Tensor], object]], ours: bool = False
) -> Callable[..., tuple[list[Tensor], object]]:
    """Wrap ``compress(tensor, name)``: it gets float32 unless the method is exact, and returns a list of tensors and
    ctx.

    Args:
        compress: the method that the class defines.
        ours: True for a class of Grace, whose payloads need no check.

    Raises:
        ConfigError: the tensor cannot be compressed, or the result is no payload; the message names the variable.
    """

    @functools.wraps(compress)
    def encoded(self: Any, tensor: Tensor, name: str) -> tuple[list[Tensor], object]:
        kernels = kernels_of(tensor)
        dtype = kernels.dtype(tensor)
        if dtype != "float32" and not self.traits.exact:
            if dtype not in FLOATS:
                raise self.error(f"cannot compress {name!r}, which is of dtype {dtype}: cast it to float32 first")
            tensor = kernels.cast(tensor, "float32")
        if ours:  # Grace's own methods are tested instead of checked at every step
            return compress(self, tensor, name)
        before = _changes(tensor)
        given = compress(self, tensor, name)
        if _changes(tensor) != before:
            raise self.error(f"compress() changed its input for {name!r}, {INPUT}")
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            returned = _describe_type(given)
            raise self.error(f"compress() of {name!r} must return two things, (payload, ctx), not {returned}")
        return _payload(self, given[0], name), given[1]

    return encoded


def _payload(compressor: Any, given: object, name: str) -> list[Tensor]:
    """Return the payload as a list; a single tensor becomes a list of one.

    Raises:
        ConfigError: it is empty, or holds something that is no tensor or has a dtype that cannot be sent.
    """
    payload = [_array(tensor) for tensor in (given if isinstance(given, (list, tuple)) else [given])]
    if not payload:
        raise compressor.error(
            f"the payload of {name!r} is empty, so that nothing would be sent. A method that reduces something itself "
            "yields that in exchange() instead, and says traits.rounds"
        )
    for tensor in payload:
        try:
            dtype = kernels_of(tensor).dtype(tensor)
        except TypeError:
            found = _describe_type(tensor)
            raise compressor.error(f"the payload of {name!r} holds {found}, which is no tensor") from None
        if dtype not in ITEM_SIZE:
            raise compressor.error(
                f"the payload of {name!r} holds a tensor of dtype {dtype}; what travels is of {', '.join(ITEM_SIZE)}"
            )
    return payload


def _array(value: Tensor) -> Tensor:
    """Return an array in place of NumPy's numbers, which its arithmetic makes of arrays without dimensions."""
    return np.asarray(value) if isinstance(value, np.generic) else value


def _describe_type(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def wrap_aggregate(aggregate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``aggregate(payloads, ctx, out, count)`` so that it may also be defined, and called, in GRACE's form
    ``aggregate(tensors)`` with decoded tensors."""
    by_tensors = len(inspect.signature(aggregate).parameters) == 2  # self and tensors

    @functools.wraps(aggregate)
    def aggregated(self: Any, payloads: list[list[Tensor]], *more: Any, **named: Any) -> Tensor:
        # GRACE calls aggregate(tensors), with nothing behind them.
        if by_tensors:
            return (
                _by_tensors(self, aggregate, payloads, *more, **named) if more or named else aggregate(self, payloads)
            )
        return aggregate(self, payloads, *more, **named) if more or named else self.combined(payloads)

    return aggregated


def _by_tensors(
    compressor: Any,
    aggregate: Callable[..., Tensor],
    payloads: list[list[Tensor]],
    ctx: object,
    out: Tensor,
    count: float,
) -> Tensor:
    """Write the result of ``aggregate(tensors)`` into ``out``, divided if it is to be a mean."""
    decoded = []
    for place, payload in enumerate(payloads):
        with payload_of(place):
            decoded.append(check_shape(compressor.decompress(payload, ctx), out))
    total = check_shape(aggregate(compressor, decoded), out, "aggregate()")
    return kernels_of(out).divide(out, total, count if compressor.average else 1)


def check_shape(value: Tensor, out: Tensor, what: str = "decompress()") -> Tensor:
    """Return the value if it has the shape of ``out``. Dimensions that a graph does not know are not compared.

    Raises:
        PayloadError: it is no tensor, or has another shape, and would be broadcast.
    """
    wanted = tuple(out.shape)
    if not hasattr(value, "shape"):
        raise PayloadError(f"{what} gave {_describe_type(value)}, where a tensor of shape {wanted} is wanted")
    got = tuple(value.shape)
    if got != wanted and None not in (*got, *wanted):
        raise PayloadError(f"{what} gave a tensor of shape {got}, where {wanted} is wanted")
    return _array(value)


def check_decodes(compressor: Any, payload: list[Tensor], ctx: object, tensor: Tensor, name: str) -> None:
    """Refuse a compressor that decodes its own payload to another shape, before anything is sent."""
    try:
        check_shape(compressor.decompress(payload, ctx), tensor)
    except PayloadError as error:
        raise ConfigError(
            f"{compressor.spec}: {error} for {name!r}. It must return a tensor of the shape that compress() was given"
        ) from None
