"""The codec of a communicator that moves payloads itself, variable by variable, in the original GRACE's contract."""

import inspect
from collections.abc import Callable, Sequence
from typing import TypeVar

from grace.core.communicator import Communicator
from grace.core.compressor import Payload, Tensor
from grace.core.user_parts import check_shape
from grace.errors import ExchangeError, GraceError, PayloadError
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.header import Header
from grace.exchange.layout import Layout
from grace.kernels import Kernels, kernels_of

T = TypeVar("T")
"""Type of a method's result: handles, or a mean."""


class SendReceiveCodec(PerVariableCodec):
    """Codec whose wire has a header alone; the communicator moves the payloads.

    A communicator that blocks (``send_receive``) is called at the end of the step, variable by variable, in one order
    on all ranks. The collectives of ``async_send`` and ``wait_receive`` are started as soon as a bucket's gradients are
    complete; over engines whose ranks start buckets in any order, at the end. The communicator gets copies, which it
    may change in place.
    """

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool = False):
        super().__init__(bucket, kernels, on_device)
        self.communicator: Communicator = self.bucket.communicator
        self.varies = False  # the communicator itself handles sizes
        self.known = [None]
        self.payloads: list[list[Tensor]] = []
        self.handles: list[object] = []
        self.values: list[Tensor] = []
        """Means of the variables; None for one whose payload could not be decoded."""
        self.moved = self.received = False

    def _packed(self, payloads: Sequence[Payload], header: Header) -> Tensor:
        k = self.kernels
        moved = Layout.from_payloads(k, payloads, False)
        self.payloads = [[self._copied(tensor) for tensor in payload] for payload in payloads]
        self.handles = []
        self.values = []
        self.moved = self.received = False
        nothing = k.zeros((0,), "uint8", payloads[0][0])
        buffer = super()._packed([[nothing]] * len(payloads), header)
        # Count the payloads as if they were in this wire.
        self.layouts[0].payload_bytes = moved.payload_bytes
        return buffer

    def _copied(self, tensor: Tensor) -> Tensor:
        k = self.kernels
        return k.reshape(k.join([k.flat(tensor)]), tuple(tensor.shape)) if k.mutable else tensor

    def move(self, label: Callable[[], str]) -> None:
        """Start to move payloads, unless they are under way.

        Args:
            label: returns the engine's name of the next collective.
        """
        if not self.moved and not self.communicator.blocks:
            for payload, name in zip(self.payloads, self.names, strict=True):
                self.handles.append(self._call(self.communicator.async_send, payload, label(), name))
        self.moved = True

    def receive_all(self, label: Callable[[], str]) -> tuple[PayloadError, str] | None:
        """Await the means of all variables.

        Returns:
            the first error of a payload that could not be decoded, and its variable; None if all were decoded.
        """
        self.move(label)
        blocks = self.communicator.blocks
        method = self.communicator.send_receive if blocks else self.communicator.wait_receive
        failure = None
        self.values = []
        for i, name in enumerate(self.names):
            given = self.payloads[i] if blocks else self.handles[i]
            try:
                value = self._call(method, given, label(), name, ctx=self.encoded[i][1])
                self.values.append(self._checked(value, i, method))
            except PayloadError as error:  # raised later: the other variables' collectives must still be awaited
                failure = failure or (error, name)
                self.values.append(None)
        self.received = True
        return failure

    def _checked(self, value: Tensor, i: int, method: Callable[..., object]) -> Tensor:
        """Return a mean in its dtype; refuse one of another shape."""
        variable = self.bucket.variables[i]
        try:
            k = kernels_of(value)
            check_shape(value, k.zeros(variable.shape, "uint8", value), "it")
        except (TypeError, PayloadError) as error:
            raise self._failed(method, self.names[i], str(error)) from None
        return k.cast(value, variable.dtype if self.exact else "float32")

    def _call(self, method: Callable[..., T], first: object, label: str, name: str, **options: object) -> T:
        """Call a method of the communicator, whose collectives over the backend get their own label."""
        backend = self.communicator.backend
        backend.label = label
        try:
            return call_with_accepted(method, first, **options, name=name)
        except GraceError:
            raise
        except Exception as error:
            raise self._failed(method, name, f"{type(error).__name__}: {error}") from error
        finally:
            backend.label = ""

    def _failed(self, method: Callable[..., object], name: str, why: str) -> ExchangeError:
        return ExchangeError(
            f"{self.communicator.backend.rank_label}: {type(self.communicator).__name__}.{method.__name__}() of "
            f"{name!r} at step {self.context.step}: {why}"
        )

    def decode(self, wires: Sequence[Tensor], layouts: Sequence[Layout], outs: Sequence[Tensor | None]) -> list[Tensor]:
        return self.values


def call_with_accepted(method: Callable[..., T], first: object, **options: object) -> T:
    """Return ``method(first, ...)``, called with the ``options`` that it accepts, by its parameters' names: GRACE's
    frameworks pass ctx and name in different orders, or leave one out. Parameters of other names are passed in order.

    >>> call_with_accepted(lambda tensors, name, ctx: (tensors, name, ctx), [1], ctx="ctx", name="w")
    ([1], 'w', 'ctx')
    >>> call_with_accepted(lambda handles, ctx: (handles, ctx), [1], ctx="ctx", name="w")
    ([1], 'ctx')
    """
    names = list(inspect.signature(method).parameters)[1:]
    if options.keys() >= set(names):
        return method(first, **{name: options[name] for name in names})
    return method(first, *list(options.values())[: len(names)])
