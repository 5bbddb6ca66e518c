"""The exchange of ReduceBroadcast: payloads to one destination, and its answer back to all."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

from grace.core.backend import Handle
from grace.core.compressor import Compressor, Payload, Tensor
from grace.core.memory import Memory
from grace.errors import PayloadError
from grace.exchange.base import Exchange
from grace.exchange.bucket import Carrier, Outcome
from grace.exchange.statuses import learn
from grace.exchange.tracing import recorder
from grace.exchange.wire import MISSING, OVERFLOW, PRESENT, REFUSED, Wire, both, in_range, mark


class ThroughOne(Carrier, Protocol):
    """What this round trip asks of its communicator besides."""

    root: int
    answers: Compressor
    answer_memory: Memory

    def broadcast(self, wire: Tensor) -> Handle: ...
    def rescale_answers(self, loss_scale: float) -> None: ...


class ReduceBroadcastExchange(Exchange):
    """A gather and a broadcast, as often as the method has rounds.

    Where the numbers of elements depend on the data, the sizes of the payloads go ahead of both.
    """

    communicator: ThroughOne

    def _start(self, gradients: Sequence[Tensor]) -> None:
        self.answered = self.announced = False
        self.root, self.back = self.communicator.root, self.communicator.answers
        self.loss_scale = self.communicator.context.loss_scale
        super()._start(gradients)

    @property
    def here(self) -> bool:
        """Whether this rank is the destination."""
        return self.communicator.backend.rank == self.root

    def advance(self) -> bool:
        """Start the next dependent collective; False if there is none (left)."""
        if self.refusal and not self.announced:
            return False
        if self.sizing:
            return self._send_sized()
        if not self.answered:
            self._answer()
        elif self.announced:
            return self._send_announced()
        elif self.round < self.traits.rounds:
            self.answered = False
            super().advance()  # takes the mean, and sends the next payload
        else:
            return False
        return True

    @property
    def everyone(self) -> bool:
        """Answers tell all ranks' places."""
        return True

    def _broadcast(self, tensor: Tensor) -> None:
        self._launch(lambda t: self.communicator.broadcast(t).map(lambda received: [received]), tensor)

    # -- at the destination ----------------------------------------------------------------------------

    def _answer(self) -> None:
        """All payloads are here: send the answer round."""
        self.wait()
        began = time.perf_counter()
        if self.communicator.sums:
            with recorder.phase("sum", bucket=self.bucket):
                buffer = self._total()
            self._count_answer(self.wire, buffer)
        else:
            buffer = self._mean_compressed()
        self.answered = True
        self.traffic.codec_seconds += time.perf_counter() - began
        if not self.announced:
            self._broadcast(buffer)
            return
        self.answer = buffer
        sizes = [0] * len(self.wire.shapes)
        if self.refused is not None:
            sizes = [-1 - self.names.index(self.refused)] * len(sizes)
        elif self.here:
            sizes = self.answer_wire.sizes()
        announced = self.kernels.full(sizes, "int64", self.bucket.buffer)
        if self.here:
            self.traffic.header_bytes += self.kernels.nbytes(announced)
        self._broadcast(announced)

    def _total(self) -> Tensor:
        """The sum of all ranks' wires, added in float32 (or float64) and rounded once; elsewhere, room for it."""
        k, wires = self.kernels, self.handle.result()
        if not self.here:
            return k.zeros((self.wire.length,), self.wire.dtype, self.bucket.buffer)
        if len(wires) == 1:
            return k.join([wires[0]])
        wide = "float64" if self.wire.dtype == "float64" else "float32"
        total = k.zeros((self.wire.length,), wide, self.bucket.buffer)
        for wire in wires:
            total = k.add(total, wire)
        return k.cast(total, self.wire.dtype)

    def _mean_compressed(self) -> Tensor:
        """The compressed means, as a wire; elsewhere, room for it."""
        k, communicator = self.kernels, self.communicator
        self.announced = self.varies
        communicator.rescale_answers(self.loss_scale)  # everywhere: who decodes votes multiplies with it
        if not self.here:
            return k.zeros((self.wire.length,), "uint8", self.bucket.buffer)
        with recorder.phase("unpack", bucket=self.bucket):
            wires = self.handle.result()
            layouts = self.layouts or [self.wire] * len(wires)
            wires = [buffer[: layout.length] for layout, buffer in zip(layouts, wires, strict=True)]
            if not self.far and self.look(layouts, wires):
                self.answer_wire = self.wire
                return self._refusal([MISSING] * len(self.names))
            found = [layout.marked(buffer) for layout, buffer in zip(layouts, wires, strict=True)]
            here, well = self._learn_of(found)
            if self.refused is not None:
                return self._refusal([REFUSED if name == self.refused else MISSING for name in self.names])
            received = [layout.unpack(buffer) for layout, buffer in zip(layouts, wires, strict=True)]
        payloads, marks = [], []
        for i, name in enumerate(self.names):
            try:
                mean, payload, ctx = self._compressed_mean(i, [payloads_of[i] for payloads_of in received])
            except PayloadError as error:
                self.refuse(error, name)
                return self._refusal([REFUSED if other == name else MISSING for other in self.names])
            with recorder.phase("update", variable=name):
                ok = both(well[i], in_range(k, mean, payload, self.communicator.answer_memory.stateful))
                ok = ok if self.far else bool(ok)
                if not self.far and not (here[i] and ok):
                    self._forget(name)
                else:
                    self.communicator.answer_memory.update(mean, name, self.back, payload, ctx)
            payloads.append(payload)
            marks.append(here[i] * mark(True, ok, False))
        if self.far and self.communicator.foreign:  # of what was withheld an overflow becomes a refusal
            withheld = sum(k.cast(k.cast(told, "float32") > OVERFLOW, "float32") for told in found)
            marks = [told + k.cast(more > 0, "float32") for told, more in zip(marks, withheld, strict=True)]
        if self.far:  # what was learnt is kept when somebody reads that it may be
            self.ask([k.full(marks, "float32", self.bucket.buffer)], self._forget_unkept)
        with recorder.phase("pack", bucket=self.bucket):
            self.answer_wire = Wire(k, payloads, False, self.room)
            told = self.told
            if self.far and self.room:  # each rank's place is where the others have zeros
                told = sum(layout.told(buffer) for layout, buffer in zip(layouts, wires, strict=True))
            buffer = self.answer_wire.pack(payloads, marks, places=told)
        self._count_answer(self.answer_wire, buffer)
        return buffer

    def _learn_of(self, marks: Sequence[Tensor]) -> tuple[list[Any], list[Any]]:
        """Per variable whether some rank had a gradient, and whether none overflowed: bools, or 0-d tensors."""
        if self.far:
            k = self.kernels
            here = sum(k.cast(told, "float32") for told in marks) > 0
            return list(k.cast(here, "float32")), list(k.cast(self.spoilt_by(marks) == 0, "float32"))
        ranks = list(zip(*map(self.kernels.to_list, marks), strict=True))
        for name, told in zip(self.names, ranks, strict=True):
            if REFUSED in told and self.refusal is None:  # the others wait for an answer
                self.refused, self.refusal = name, self.withheld or self.withheld_by(told.index(REFUSED), name)
        return [max(told) > MISSING for told in ranks], [max(told) < OVERFLOW for told in ranks]

    def _forget(self, name: str) -> None:
        """Keep nothing of what the memory of the answers learnt of a variable in this step."""
        for part in self.communicator.answer_memory.whole().values():
            part.state.rollback(name)

    def _forget_unkept(self, marks: list[list[float]]) -> None:
        for name, told in zip(self.names, marks[0], strict=True):
            if told != PRESENT:
                self._forget(name)

    def _refusal(self, marks: list[int]) -> Tensor:
        """An answer without payloads."""
        k, like = self.kernels, self.bucket.buffer
        ends = [*marks, *(self.told or [0] * self.room), *[0] * self.wire.padding]
        return k.join([k.zeros((self.wire.body,), "uint8", like), k.full(ends, "uint8", like)])

    def _compressed_mean(self, i: int, payloads: list[Payload]) -> tuple[Tensor, Payload, Any]:
        """One variable's mean with what the memory of the answers adds to it, and its payload."""
        name, size = self.names[i], self.communicator.context.size
        with recorder.phase("decode", variable=name):
            mean = self.kernels.zeros(self.bucket.variables[i].shape, "float32", self.bucket.buffer)
            mean = self.compressor.aggregate(payloads, self.encoded[i][1], mean, size)
        return self._compressed(mean, name)

    def _compressed(self, mean: Tensor, name: str) -> tuple[Tensor, Payload, Any]:
        with recorder.phase("compensate", variable=name):
            mean = self.communicator.answer_memory.compensate(mean, name)
        with recorder.phase("compress", variable=name):
            payload, ctx = self.back.compress(mean, f"{name}/answer")
        return mean, payload, ctx

    def _count_answer(self, wire: Wire, buffer: Tensor) -> None:
        if self.here and self.communicator.context.size > 1:
            self._count(wire, buffer)

    # -- everywhere ------------------------------------------------------------------------------------

    def _send_announced(self) -> bool:
        """The answer's sizes are known: send it; False if there is none, which all ranks see."""
        self.wait()
        self.announced = False
        (sizes,) = self.handle.result()
        try:
            told = [-1 - int(n) for n in self.kernels.to_list(sizes[:1])]
            self.check_refused([[REFUSED if i in told else MISSING for i in range(len(self.names))]], self.root)
            self.answer_wire = self._layout(self.root, sizes)
        except PayloadError as error:
            self.refusal = error
            return False
        buffer = self.answer if self.here else None
        if buffer is None:
            buffer = self.kernels.zeros((self.answer_wire.length,), "uint8", self.bucket.buffer)
        self._broadcast(buffer)
        return True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Decode the answer."""
        if self.communicator.sums:
            return super().finish(outs, wait)
        if wait:
            self.wait()
        began = time.perf_counter()
        if self.refusal:
            raise self.refusal
        outcomes: list[Outcome] = []
        decode = self.decoding(lambda i, out, name: self._decoded(i, payloads[i], out), self.root)
        with recorder.phase("unpack", bucket=self.bucket):
            (buffer,) = self.handle.result()
            wire = self.answer_wire if self.varies else self.wire
            if self.look([wire], [buffer]):
                return self.nothing()
            payloads = wire.unpack(buffer)
        if not self.far:
            statuses = wire.statuses(buffer)
            self.check_refused([statuses], self.root)
        for i, variable in enumerate(self.bucket.variables):
            with recorder.phase("decode", variable=variable.name):
                outcomes.append(Outcome(variable, decode(i, outs[i], variable.name), False))
        self.outcomes = outcomes
        if self.far:
            self.ask([wire.marked(buffer)], lambda numbers: self._amend_by(numbers[0]))
            if self.late:
                self._spoil([wire.marked(buffer)])
                self._spoilt_at_once()
            if not self.lazy:
                learn([self])
        else:
            self._amend_by(statuses)
        self.traffic.codec_seconds += time.perf_counter() - began
        return outcomes

    def _amend_by(self, statuses: list[float]) -> None:
        """Let the outcomes say what the answer's statuses do."""
        self.check_refused([statuses], self.root)
        self._amend([told == MISSING for told in statuses], [told >= OVERFLOW for told in statuses])

    @property
    def hides_overflow(self) -> bool:
        return not self.communicator.sums or super().hides_overflow

    def glance(self) -> None:
        """Compare the places in the answer."""
        if self.communicator.sums:
            super().glance()
        elif not self.refusal:
            self.look([self.answer_wire if self.varies else self.wire], self.handle.result())

    def _decoded(self, i: int, payload: Payload, out: Tensor | None) -> Tensor:
        if out is None:
            out = self.kernels.zeros(self.bucket.variables[i].shape, "float32", self.bucket.buffer)
        return self.back.aggregate([payload], self.encoded[i][1], out, 1)
