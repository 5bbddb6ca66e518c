"""One exchange: the round trip of one bucket of variables."""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from grace.core.backend import Backend, Handle
from grace.core.compressor import Compressor, Tensor
from grace.core.ported import check_decodes
from grace.core.waiting import waiting
from grace.errors import ExchangeError, GraceError, PayloadError
from grace.exchange.at_once import AtOnce
from grace.exchange.bucket import Contribution, Outcome
from grace.exchange.refusals import Refusing
from grace.exchange.rounds import Rounds
from grace.exchange.statuses import Judging, learn
from grace.exchange.tracing import recorder
from grace.exchange.wire import Wire, in_range, mark
from grace.kernels import kernels_of


class Exchange(AtOnce, Refusing, Judging, Rounds):
    """The round trip of one bucket; ``start`` it, ``advance`` until it says False, then ``finish``.

    1. compensate and compress each gradient; 2. pack all payloads and start the collective;
    3. update memories while it is under way; 4. for methods of several rounds, take the mean and go on;
    5. decompress, aggregate in float32, and hand back the mean.

    Args:
        contribution: what this rank puts into it.
    """

    by_codec: ClassVar[bool] = True
    """Whether it may use the codec of a whole bucket; each class says so itself, since it may encode otherwise."""

    def __init__(self, contribution: Contribution):
        bucket, gradients, present, self.guard, self.traffic = contribution
        self.bucket, self.present = bucket, list(present)
        self.communicator = bucket.communicator
        self.compressor, self.memory = self.communicator.compressor, self.communicator.memory
        self.traits = self.compressor.traits
        self.names = bucket.names
        self.kernels = kernels_of(gradients[0])
        self.far = self.puts_off and self.kernels.far(gradients[0])
        self.varies = self.traits.varies and not (self.far and self.compressor.bounded)
        self.handle: Any = None
        self.ranged = []
        self.round, self.sizing, self.concatenated = 1, False, False
        self.comparing = self.traits.fixed_size is None and (bucket.compares or not bucket.compared)
        """Whether nobody said that payloads are of equal sizes, and they are to be compared first."""
        self.collectives = 0
        self.traced: Any = None
        self.over: Any = None
        """The backend that a collective is under way over."""
        self.spoilt = [False] * len(self.names)
        self.encoded: list[tuple[Any, Any]] = []
        """Payload and ctx, per variable."""
        self.layouts: list[Wire] = []
        self.sound: list[Any] = [True] * len(self.names)
        """Whether what this rank sends is in range, per variable, as far as somebody has to know."""
        self._start(gradients)

    # -- sending ---------------------------------------------------------------------------------------

    def _start(self, gradients: Sequence[Tensor]) -> None:
        began = time.perf_counter()
        if vars(type(self)).get("by_codec") and self._encoded_at_once(gradients):
            self._leave(self.bucket.buffer, began)
            return
        if self.traits.rounds > 1:
            self._start_rounds(gradients, began)
            return
        inputs = recorder.each("compensate", self.names, self._compensated, gradients)
        self.encoded = recorder.each("compress", self.names, self.compressor.compress, inputs)
        decodes = type(self.compressor).accumulate is Compressor.accumulate
        if self.bucket.wire is None and self.communicator.foreign and decodes:
            for x, (payload, ctx), name in zip(inputs, self.encoded, self.names, strict=True):
                check_decodes(self.compressor, payload, ctx, x, name)
        self._send([payload for payload, _ in self.encoded], inputs, began)
        began = time.perf_counter()
        if vars(type(self)).get("by_codec"):
            self.find_codec()
        if self.withheld is None:  # else nothing is kept of this step
            recorder.each("update", self.names, self._update, inputs, self.encoded)
        self.traffic.codec_seconds += time.perf_counter() - began

    def _compensated(self, gradient: Tensor, name: str) -> Tensor:
        """What to compress: the gradient, in float32 and contiguous unless the method is exact, and what its memory
        adds."""
        if not self.traits.exact or self.memory.stateful:
            k = self.kernels
            gradient = k.reshape(k.flat(k.cast(gradient, "float32")), tuple(gradient.shape))
        return self.memory.compensate(gradient, name)

    def _update(self, tensor: Tensor, encoded: tuple[Any, Any], name: str) -> None:
        """Let the memory learn what a payload and its ctx leave out of the tensor."""
        self.memory.update(tensor, name, self.compressor, *encoded)

    def _send(self, payloads: list[Any], inputs: list[Tensor] | None, began: float) -> None:
        with recorder.phase("pack", bucket=self.bucket):
            buffer = self._packed(self._predivided(payloads), inputs)
        self._leave(buffer, began)

    def _leave(self, buffer: Tensor, began: float) -> None:
        """Start the first collective for what was packed."""
        self._count(self.wire, buffer)
        self.traffic.codec_seconds += time.perf_counter() - began
        backend = self.communicator.backend
        if not self.comparing and (not self.varies or self.communicator.sums):
            self._go()
            return
        sizes = self.kernels.full(self.wire.marks() if self.comparing else self.wire.sizes(), "int64", buffer)
        self.traffic.header_bytes += self.kernels.nbytes(sizes)
        if self.comparing:
            self.sizing = True
            self._launch(backend.allgather, sizes)
            return
        if backend.concatenates and self.communicator.gathers:  # the engine takes care of the lengths
            self.concatenated = True
            self._launch(backend.concatenate, self.kernels.join([self.kernels.to_bytes(sizes), buffer]))
        else:  # first the sizes of all ranks' payload tensors; advance() goes on with the payloads
            self.sizing = True
            self._launch(backend.allgather, sizes)

    def _go(self) -> None:
        """Start the collective of what was packed."""
        self._launch(self.communicator.communicate, self.bucket.buffer)

    def _predivided(self, payloads: list[Any]) -> list[Any]:
        """Payloads that the engine sums, in the range that the user wants for the sum."""
        by, k = self.communicator.context.predivide, self.kernels
        if by == 1 or not self.communicator.sums:
            return payloads

        def divided(tensor: Tensor) -> Tensor:
            return k.divide(k.zeros(tuple(tensor.shape), k.dtype(tensor), tensor), tensor, by)

        return [[divided(tensor) for tensor in payload] for payload in payloads]

    def _packed(self, payloads: list[Any], inputs: list[Tensor] | None) -> Tensor:
        """The wire's buffer: the payloads, and statuses that say what is in the inputs."""
        return self._filled(payloads, self._marks(payloads, inputs))

    def _marks(self, payloads: list[Any], inputs: list[Tensor] | None) -> list[Any]:
        """The statuses of the inputs; of none where they are not a first round's."""
        if inputs is not None and (not self.traits.carries_nonfinite or self.communicator.delayed):
            kept, known = self.communicator.stateful, self.ranged or [None] * len(inputs)
            self.sound = [
                here and in_range(self.kernels, x, payload, kept, found)
                for here, x, payload, found in zip(self.present, inputs, payloads, known, strict=True)
            ]
        finite = [True] * len(payloads) if inputs is None else self.sound
        return [mark(here, ok, self.communicator.sums) for here, ok in zip(self.present, finite, strict=True)]

    def _filled(self, payloads: Sequence[Any], marks: list[Any]) -> Tensor:
        reusable = not self.varies and self.traits.rounds == 1
        if self.bucket.wire is None or not reusable or self.comparing:
            # what a method of several rounds receives may live on in its state: it gets buffers of its own
            wire = Wire(self.kernels, payloads, self.communicator.sums, self.room)
            self.bucket.wire, self.bucket.buffer = wire, None
        elif self.communicator.foreign:
            payloads, marks = self._withhold(payloads, marks)
        self.wire = self.bucket.wire
        self.bucket.buffer = self.wire.pack(payloads, marks, self.bucket.buffer, self.own_place())
        return self.bucket.buffer

    def _launch(self, collective: Callable[[Tensor], Handle], tensor: Tensor) -> None:
        backend = self.communicator.backend
        before = backend.sent_bytes
        self.collectives += 1
        backend.label, Backend.began = f"{self.bucket.label}.{self.collectives}", self.bucket
        backend.started, self.over = backend.started + 1, backend
        self.traced = recorder.collective(self.bucket, backend.label, self.kernels.nbytes(tensor))
        try:
            self.handle = collective(tensor)
        except GraceError:
            raise
        except Exception as error:
            raise self.failure(error) from error
        finally:
            backend.label = ""
        self.traffic.sent_bytes += backend.sent_bytes - before

    def _count(self, wire: Wire, buffer: Tensor) -> None:
        """Count a buffer that is about to leave."""
        self._add(wire.payload_bytes)
        self.traffic.header_bytes += self.kernels.nbytes(buffer) - wire.total

    def _add(self, payload_bytes: list[int]) -> None:
        """Count the variables' payloads."""
        self.traffic.add(self.names, payload_bytes)
        if recorder.active is not None:
            recorder.payload(dict(zip(self.names, payload_bytes, strict=True)))

    # -- receiving -------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until the collective under way is done.

        Raises:
            ExchangeError: the engine failed; the message names the bucket and what the engine said.
        """
        began = time.perf_counter()
        with waiting(self.place):
            try:
                with recorder.phase("wait", "wait", bucket=self.bucket):
                    self.handle.wait()
                    self.arrived()
            except Exception as error:
                raise self.failure(error) from error
        self.traffic.wait_seconds += time.perf_counter() - began

    def arrived(self) -> None:
        """The collective under way is known to be done."""
        if self.over is not None:
            self.over.done, self.over = self.over.done + 1, None
        if self.traced is not None:
            self.traced.end()
            self.traced = None

    @property
    def blocks(self) -> bool:
        """Whether who awaits it must block: there is nothing of the engine's to await instead."""
        return not self.handle.works

    def advance(self) -> bool:
        """Start the next dependent collective; False if there is none (left)."""
        if self.sizing:
            return self._send_sized()
        if self.round == self.traits.rounds:
            return False
        self.wait()
        self._next_round(time.perf_counter())
        return True

    def _send_sized(self) -> bool:
        """All ranks' sizes are known: send the payloads, padded with zeros to the longest wire; False if they cannot
        be, which all ranks see."""
        self.wait()
        if self.comparing:
            return self._send_compared()
        try:
            self.layouts = [self._layout(rank, sizes) for rank, sizes in enumerate(self.handle.result())]
        except PayloadError as error:
            self.sizing, self.refusal = False, error
            return False
        longest = max(layout.length for layout in self.layouts)
        extra = max(0, longest - self.wire.length)  # no rank may leave the others alone, if its sizes were damaged too
        zeros = self.kernels.zeros((extra,), "uint8", self.bucket.buffer)
        buffer = self.kernels.join([self.bucket.buffer[:longest], zeros])
        self.traffic.header_bytes += extra
        self.sizing = False
        self._launch(self.communicator.communicate, buffer)
        return True

    def _wires(self) -> list[Tensor]:
        """What came: all ranks' wires, or their sum. Their layouts are known from now on."""
        wires = self._cut() if self.concatenated else self.handle.result()
        if self.layouts:
            return [buffer[: layout.length] for layout, buffer in zip(self.layouts, wires, strict=True)]
        self.layouts = [self.wire] * len(wires)
        return list(wires)

    def _cut(self) -> list[Tensor]:
        """Each rank's wire out of the concatenation; in front of each are the sizes of its payload tensors."""
        (whole,) = self.handle.result()
        header, start, wires = 8 * len(self.wire.shapes), 0, []
        self.layouts = []
        for rank in range(self.communicator.context.size):
            raw = whole[start : start + header]
            if raw.shape[0] < header:
                break
            sizes = self.kernels.from_bytes(raw, "int64", (len(self.wire.shapes),))
            self.layouts.append(self._layout(rank, sizes))
            start += header
            wires.append(whole[start : start + self.layouts[-1].length])
            start += self.layouts[-1].length
        if len(wires) < self.communicator.context.size or start != whole.shape[0]:
            raise self.undecoded(PayloadError("the payloads are of other sizes than they say"), self.bucket.ends)
        return wires

    def _mean(self) -> list[Any]:
        """The reduced payloads, divided by the number of ranks."""
        (buffer,) = self.handle.result()
        if self._count_of_sum != 1:
            buffer = self._divided(buffer, self._count_of_sum)
        return self.wire.unpack(buffer)

    def _divided(self, buffer: Tensor, by: float) -> Tensor:
        """What is divided in place of a wire; what stands behind the payloads, too, if it was read."""
        part = buffer[: self.wire.body] if self.far else buffer
        return self.kernels.divide(part, part, by)

    def hand_over(self) -> None:
        """The step ends: what is applied in a later one goes on its way."""

    def forget(self) -> None:
        """The engine has given up the step."""

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Decode and aggregate; each value is written into its ``out`` where one is given.

        Args:
            outs: a float32 tensor of the variable's shape (of its own dtype for exact methods), or None.
            wait: False if the collective is known to be done.

        Raises:
            PayloadError: what a rank sent cannot be decoded; the message names the rank, the variable and the method.
        """
        if wait:
            self.wait()
        began = time.perf_counter()
        several = self.traits.rounds > 1
        if self.refusal:
            raise self.refusal
        with recorder.phase("unpack", bucket=self.bucket):
            wires = self._wires()
            missing, overflow = self._statuses_of_round() if several else self._statuses_of(wires)
            if self.astray:
                return self.nothing()
        outcomes = self._decoded_at_once(wires, outs)
        if outcomes is None:
            with recorder.phase("unpack", bucket=self.bucket):
                received: list[Any] = self._mean() if several else self._received(wires)
            if several:
                self.encoded = self.decoding(self._returned)(received, self.bucket.ends)
            decode = self.decoding(self._last if several else self._aggregate)
            outcomes = recorder.each("decode", self.names, decode, range(len(self.names)), received, outs)
        if several and self.codec is None:
            if vars(type(self)).get("by_codec"):
                self.find_codec()
            recorder.each("update", self.names, self._update, self.inputs, self.encoded)  # with what all ranks got
        self.outcomes = outcomes
        self._amend(missing, overflow)
        self._spoilt_at_once()
        if self.questions and not self.lazy:
            learn([self])
        self.traffic.codec_seconds += time.perf_counter() - began
        return outcomes

    def _received(self, wires: list[Tensor]) -> list[list[Any]]:
        """The payloads of all ranks, or their sum, per variable."""
        self.count = self._count_of_sum if self.communicator.sums else self.communicator.context.size
        if self.traits.exact and self.communicator.sums:  # one division for the whole bucket
            wires, self.count = [self._divided(wires[0], self.count)], 1
        received = [layout.unpack(buffer) for layout, buffer in zip(self.layouts, wires, strict=True)]
        return [[payloads[i] for payloads in received] for i in range(len(self.names))]

    def _aggregate(self, i: int, payloads: list[Any], out: Tensor | None, name: str) -> Outcome:
        variable = self.bucket.variables[i]
        if out is None:
            dtype = variable.dtype if self.traits.exact else "float32"
            out = self.kernels.zeros(variable.shape, dtype, self.bucket.buffer)
        return Outcome(variable, self.compressor.aggregate(payloads, self.encoded[i][1], out, self.count), False)

    def place(self) -> str:
        """What a rank that waits for it is said to be in."""
        return f"the exchange of {self.bucket.describe()} at step {self.communicator.context.step}"

    def failure(self, error: Exception) -> ExchangeError:
        """The error of an engine that failed: it says which rank has ended or is elsewhere, as far as it told."""
        when = f" at step {self.communicator.context.step}"
        return self.communicator.backend.failed(f"the exchange of {self.bucket.describe()}", when, error)
