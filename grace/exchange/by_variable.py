"""The exchange of a communicator that moves payloads itself, variable by variable, as the original GRACE's do."""

import dataclasses
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grace.core.compressor import Payload, Tensor
from grace.core.ported import check_shape
from grace.core.waiting import waiting
from grace.errors import ExchangeError, GraceError, PayloadError
from grace.exchange.base import Exchange
from grace.exchange.bucket import Carrier, Outcome
from grace.exchange.tracing import recorder
from grace.exchange.wire import Wire
from grace.kernels import kernels_of


class Moving(Carrier, Protocol):
    """What this round trip asks of its communicator besides."""

    blocks: bool

    def send_receive(self, tensors: Payload, ctx: Any, name: str) -> Tensor: ...
    def async_send(self, tensors: Payload, name: str) -> Any: ...
    def wait_receive(self, handles: Any, ctx: Any, name: str) -> Tensor: ...


class ByVariable(Exchange):
    """Statuses and places travel as ever, in a wire without payloads; payloads go the communicator's own way.

    What blocks runs at the end of the step, variable by variable, in one order on all ranks; what the communicator
    starts and awaits is started as soon as a bucket's gradients are there, but at the end over engines whose ranks
    start buckets in any order. It is given copies, which it may change in place.
    """

    communicator: Moving
    puts_off = False

    def _start(self, gradients: Sequence[Tensor]) -> None:
        self.sent, self.handles, self.values = False, list[Any](), list[Any]()
        # what overflowed is known by statuses alone; the sizes are the communicator's business
        self.traits = dataclasses.replace(self.traits, carries_nonfinite=False, fixed_size=True)
        self.comparing = self.varies = False
        super()._start(gradients)

    # -- sending ---------------------------------------------------------------------------------------

    def _packed(self, payloads: list[Any], inputs: list[Tensor] | None) -> Tensor:
        k, marks = self.kernels, self._marks(payloads, inputs)
        self.layout, like = Wire(k, payloads, False), payloads[0][0]
        self.payloads = [[self._copied(tensor) for tensor in payload] for payload in payloads]
        return self._filled([[k.zeros((0,), "uint8", like)]] * len(payloads), marks)

    def _copied(self, tensor: Tensor) -> Tensor:
        k = self.kernels
        return k.reshape(k.join([k.flat(tensor)]), tuple(tensor.shape)) if k.mutable else tensor

    def _count(self, wire: Wire, buffer: Tensor) -> None:
        self._add(self.layout.payload_bytes)
        self.traffic.header_bytes += self.kernels.nbytes(buffer)

    def _go(self) -> None:
        backend = self.communicator.backend
        self._launch(backend.allgather, self.bucket.buffer)
        if not backend.pairs_by_name:
            self._send_payloads()

    def _send_payloads(self) -> None:
        self.sent = True
        if not self.communicator.blocks:
            for payload, name in zip(self.payloads, self.names, strict=True):
                self.handles.append(self._calling(self.communicator.async_send, payload, name=name))

    def _calling(self, method: Callable[..., Any], first: Any, **told: Any) -> Any:
        """Call a method of the communicator; what it starts over the backend has a name of its own, and is counted."""
        backend = self.communicator.backend
        before, self.collectives = backend.sent_bytes, self.collectives + 1
        backend.label = f"{self.bucket.label}.{self.collectives}"
        try:
            return called(method, first, **told)
        except GraceError:
            raise
        except Exception as error:
            raise self._failed(method, told["name"], f"{type(error).__name__}: {error}") from error
        finally:
            backend.label = ""
            self.traffic.sent_bytes += backend.sent_bytes - before

    def _failed(self, method: Callable[..., Any], name: str, why: str) -> ExchangeError:
        context = self.communicator.context
        return ExchangeError(
            f"rank {context.rank} of {context.size}: {type(self.communicator).__name__}.{method.__name__}() of "
            f"{name!r} at step {context.step}: {why}"
        )

    # -- receiving -------------------------------------------------------------------------------------

    @property
    def blocks(self) -> bool:
        return True

    def advance(self) -> bool:
        """Start what is not under way yet."""
        if not self.sent and not self.refusal:
            self._send_payloads()
        return False

    def wait(self) -> None:
        """Block until the communicator has brought all means."""
        if self.refusal or self.values:
            super().wait()
            return
        over, traced = self.over, self.traced
        self.over = self.traced = None  # the exchange is under way until its last collective is
        super().wait()
        if not self.sent:
            self._send_payloads()
        began = time.perf_counter()
        with waiting(self.place), recorder.phase("wait", "wait", bucket=self.bucket):
            for i in range(len(self.names)):
                self.values.append(self._received_of(i))
        self.traffic.wait_seconds += time.perf_counter() - began
        self.over, self.traced = over, traced
        self.arrived()

    def _received_of(self, i: int) -> Tensor:
        """One variable's mean; None if what came cannot be decoded, which is told when the others' came too."""
        name, ctx, variable = self.names[i], self.encoded[i][1], self.bucket.variables[i]
        one = self.communicator.send_receive if self.communicator.blocks else self.communicator.wait_receive
        try:
            value = self._calling(
                one, self.payloads[i] if self.communicator.blocks else self.handles[i], ctx=ctx, name=name
            )
        except PayloadError as error:
            self.refusal = self.refusal or self.undecoded(error, name)
            return None
        try:
            k = kernels_of(value)
            check_shape(value, k.zeros(variable.shape, "uint8", value), "it")
        except (TypeError, PayloadError) as error:
            raise self._failed(one, name, str(error)) from None
        dtype = variable.dtype if self.traits.exact and not self.memory.stateful else "float32"
        return k.cast(value, dtype)

    def _received(self, wires: list[Tensor]) -> list[Any]:
        return self.values

    def _aggregate(self, i: int, value: Any, out: Tensor | None, name: str) -> Outcome:
        return Outcome(self.bucket.variables[i], value, False)


def called(method: Callable[..., Any], first: Any, **told: Any) -> Any:
    """``method(first, ...)`` with as much of what is told as it takes, by its parameters' names: GRACE's frameworks
    give ctx and name in different orders, or leave one out. Where they are called otherwise, in this order.

    >>> called(lambda tensors, name, ctx: (tensors, name, ctx), [1], ctx="ctx", name="w")
    ([1], 'w', 'ctx')
    >>> called(lambda handles, ctx: (handles, ctx), [1], ctx="ctx", name="w")
    ([1], 'ctx')
    """
    names = list(inspect.signature(method).parameters)[1:]
    if told.keys() >= set(names):
        return method(first, **{name: told[name] for name in names})
    return method(first, *list(told.values())[: len(names)])
