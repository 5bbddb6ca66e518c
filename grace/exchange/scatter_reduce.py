"""The exchange of ScatterReduce: shards to their ranks, means back."""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from grace.core.compressor import Compressor, Payload, Tensor, Traits
from grace.core.variable import equal_bounds
from grace.errors import PayloadError, payload_of
from grace.exchange.base import Exchange
from grace.exchange.bucket import Outcome
from grace.exchange.scatter_at_once import ScatterAtOnce
from grace.exchange.statuses import learn
from grace.exchange.tracing import recorder
from grace.exchange.wire import OVERFLOW, REFUSED, Wire, in_range, mark, mark_mean
from grace.kernels import kernels_of


class Sharded(Compressor):
    """A compressor applied shard by shard; what a memory sees of the first compression."""

    def __init__(self, inner: Compressor, shards: int):
        self.inner, self.shards = inner, shards

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the inner compressor."""
        return self.inner.traits

    def compressed(self, tensor: Tensor, name: str) -> tuple[list[Payload], Any]:
        """A payload per shard, and what decodes them."""
        flat = kernels_of(tensor).flat(tensor)
        cuts = equal_bounds(flat.shape[0], self.shards)
        coded = [self.inner.compress(flat[a:b], f"{name}/shard_{j}") for j, (a, b) in enumerate(cuts)]
        return [payload for payload, _ in coded], (cuts, [ctx for _, ctx in coded])

    def decompress(self, payload: Payload, ctx: Any) -> Tensor:
        cuts = ctx[0]
        k = kernels_of(payload[0][0])
        return self.accumulate(payload, ctx, k.zeros((cuts[-1][1],), "float32", payload[0][0]))

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        flat, shards = k.flat(out), []
        for place, ((a, b), shard, inner_ctx) in enumerate(zip(ctx[0], payload, ctx[1], strict=True)):
            with payload_of(place):
                shards.append(self.inner.accumulate(shard, inner_ctx, flat[a:b], weight))
        return out if k.mutable else k.reshape(k.join(shards), tuple(out.shape))

    def joined(self, answers: Payload, ctx: Any, out: Tensor) -> Tensor:
        """The tensor whose shards the answers are: each the aggregate of one payload, so that a vote stays a vote."""
        k = kernels_of(out)
        flat, shards = k.flat(out), []
        for place, ((a, b), shard, inner_ctx) in enumerate(zip(ctx[0], answers, ctx[1], strict=True)):
            try:
                shards.append(self.inner.aggregate([shard], inner_ctx, flat[a:b], 1))
            except PayloadError as error:
                error.place = place  # of all ranks, and not of the one payload
                raise
        return out if k.mutable else k.reshape(k.join(shards), tuple(out.shape))


class ScatterReduceExchange(ScatterAtOnce, Exchange):
    """Two collectives: an all-to-all of compressed shards, and an all-gather of compressed means.

    The wires of all shards are padded with zeros to the longest, whose length follows from the shapes, so no
    sizes have to be exchanged.
    """

    by_codec: ClassVar[bool] = True
    hides_overflow = True

    def _start(self, gradients: Sequence[Tensor]) -> None:
        began = time.perf_counter()
        self.sharded = Sharded(self.compressor, self.communicator.context.size)
        self.means_sent = False
        if vars(type(self)).get("by_codec") and self._encoded_at_once(gradients):
            self._add(self.codec.payload_bytes)
            self._send_shards(self.codec.buffer, began)
            return
        inputs = recorder.each("compensate", self.names, self._compensated, gradients)
        shards = self._shards(inputs)
        with recorder.phase("pack", bucket=self.bucket):
            kept = self.memory.stateful
            self.sound = [
                here and in_range(self.kernels, x, self._floats(payload), kept)
                for here, x, (payload, _) in zip(self.present, inputs, self.encoded, strict=True)
            ]
            marks = [mark(here, ok, False) for here, ok in zip(self.present, self.sound, strict=True)]
            self.wires = [Wire(self.kernels, payloads, False, self.room) for payloads in shards]
            self.longest = max(wire.length for wire in self.wires)
            packed = [self._padded(wire, p, marks) for wire, p in zip(self.wires, shards, strict=True)]
            buffer = self.kernels.join(packed)
        for wire in self.wires:
            self._add(wire.payload_bytes)
        self._send_shards(buffer, began)
        began = time.perf_counter()
        if vars(type(self)).get("by_codec"):
            self.find_codec()
        self._learn(inputs)
        self.traffic.codec_seconds += time.perf_counter() - began

    def _send_shards(self, buffer: Tensor, began: float) -> None:
        self.traffic.header_bytes += self.kernels.nbytes(buffer) - sum(sum(wire.payload_bytes) for wire in self.wires)
        self.traffic.codec_seconds += time.perf_counter() - began
        self._launch(self.communicator.backend.alltoall, buffer)

    def _shards(self, inputs: Sequence[Tensor]) -> list[list[Payload]]:
        """For each rank what it gets of every variable."""
        self.encoded = recorder.each("compress", self.names, self.sharded.compressed, inputs)
        return [[payload[j] for payload, _ in self.encoded] for j in range(self.sharded.shards)]

    def _floats(self, payload: Any) -> list[Tensor]:
        """The tensors of what a variable was encoded to."""
        return [tensor for shard in payload for tensor in shard]

    def _learn(self, inputs: Sequence[Tensor]) -> None:
        """Let the memory learn, while shards travel."""
        recorder.each("update", self.names, self._update, inputs, self.encoded)

    def _compensated(self, gradient: Tensor, name: str) -> Tensor:
        return self.memory.compensate(self.kernels.cast(gradient, "float32"), name)

    def _update(self, tensor: Tensor, encoded: tuple[Any, Any], name: str) -> None:
        self.memory.update(tensor, name, self.sharded, *encoded)

    def _padded(self, wire: Wire, payloads: list[Payload], marks: list[Any]) -> Tensor:
        buffer = wire.pack(payloads, marks, places=self.own_place())
        return self.kernels.join([buffer, self.kernels.zeros((self.longest - wire.length,), "uint8", buffer)])

    def advance(self) -> bool:
        """Average this rank's shard and send the means round; False once that is under way."""
        if self.means_sent:
            return False
        self.wait()
        began = time.perf_counter()
        context = self.communicator.context
        wire = self.wires[context.rank]
        with recorder.phase("unpack", bucket=self.bucket):
            rows = [row[: wire.length] for row in self.handle.result()]
            if self.look([wire] * len(rows), rows):  # as all ranks do, each of which has got something of all
                self.means_sent = True
                return False
            spoilt = self._spoilt(wire, rows)
        buffer = self._averaged_at_once(rows, spoilt)
        apart = buffer is None
        if apart:
            buffer = self._averaged(wire, rows, spoilt())
        self._count(self.replies[context.rank], buffer)
        self.means_sent = True
        self.traffic.codec_seconds += time.perf_counter() - began
        self._launch(self.communicator.communicate, buffer)
        if apart:
            began = time.perf_counter()
            self._learn_answers()
            self.traffic.codec_seconds += time.perf_counter() - began
        return True

    def _spoilt(self, wire: Wire, rows: Sequence[Tensor]) -> Callable[[], list[Any]]:
        """What tells which variables overflowed on some rank: bools, or 0-d tensors of 1.0 or 0.0; and learn which are
        missing."""
        marks = [wire.marked(row) for row in rows]

        def learnt(ranks: list[list[float]]) -> None:
            self.missing = [not any(told) for told in zip(*ranks, strict=True)]

        if self.far:
            self.missing = [False] * len(self.names)
            self.ask(marks, learnt)
            return lambda: list(self.kernels.cast(self.spoilt_by(marks) > 0, "float32"))
        ranks = [self.kernels.to_list(mark) for mark in marks]
        learnt(ranks)
        overflow = [max(told) >= OVERFLOW for told in zip(*ranks, strict=True)]
        return lambda: overflow

    def _averaged(self, wire: Wire, rows: Sequence[Tensor], overflow: Sequence[Any]) -> Tensor:
        """This rank's reply to what all ranks sent, piece by piece."""
        with recorder.phase("unpack", bucket=self.bucket):
            received = [wire.unpack(row) for row in rows]
            payloads = [[payload[i] for payload in received] for i in range(len(self.names))]
        answers, sound = self._answers(payloads)
        with recorder.phase("pack", bucket=self.bucket):
            marks = [mark_mean(ok, spoilt) for spoilt, ok in zip(overflow, sound, strict=True)]
            marks = [REFUSED if name == self.refused else m for name, m in zip(self.names, marks, strict=True)]
            return self._padded(self.replies[self.communicator.context.rank], answers, marks)

    @property
    def replies(self) -> list[Wire]:
        """How each rank's answer is laid out: as its shards were."""
        return self.wires

    def _answers(self, payloads: list[list[Payload]]) -> tuple[list[Payload], list[Any]]:
        """This rank's answer for every variable, of what all ranks sent of it, and whether it is in range."""
        context, k = self.communicator.context, self.kernels
        shards = [(cuts[context.rank], ctxs[context.rank]) for _, (cuts, ctxs) in self.encoded]
        means = recorder.each("decode", self.names, self._shard_mean, payloads, shards)
        self.means = means = recorder.each("compensate", self.names, self.shard_memory.compensate, means)
        self.answers = recorder.each("compress", self.names, self._compressed_mean, means)
        kept = self.shard_memory.stateful
        sound = [in_range(k, mean, payload, kept) for mean, (payload, _) in zip(means, self.answers, strict=True)]
        return [payload for payload, _ in self.answers], sound

    def _learn_answers(self) -> None:
        """Let the memory of this rank's shards learn, while means travel."""
        recorder.each("update", self.names, self._update_shard, self.means, self.answers)

    def _shard_mean(self, payloads: list[Payload], shard: tuple[tuple[int, int], Any], name: str) -> Tensor:
        """Of this rank's shard; ``shard`` is where it begins and ends, and the ctx of its compression."""
        (a, b), ctx = shard
        mean = self.kernels.zeros((b - a,), "float32", payloads[0][0])
        try:
            return self.compressor.aggregate(payloads, ctx, mean, self.communicator.context.size)
        except PayloadError as error:  # the others wait for the mean: they are told with it
            self.refuse(error, name)
            return self.kernels.zeros((b - a,), "float32", payloads[0][0])

    def _compressed_mean(self, mean: Tensor, name: str) -> tuple[Payload, Any]:
        return self.compressor.compress(mean, f"{name}/mean_{self.communicator.context.rank}")

    def _update_shard(self, mean: Tensor, encoded: tuple[Any, Any], name: str) -> None:
        self.shard_memory.update(mean, name, self.compressor, *encoded)

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Put the means of all shards together."""
        if self.astray:
            return self.nothing()
        if wait:
            self.wait()
        began = time.perf_counter()
        with recorder.phase("unpack", bucket=self.bucket):
            rows = [row[: wire.length] for row, wire in zip(self.handle.result(), self.replies, strict=True)]
            marks = [wire.marked(row) for row, wire in zip(rows, self.replies, strict=True)]
        if self.far:
            self.ask(marks, self._learn_means)
            overflow = [False] * len(self.names)
        else:
            overflow = self._overflown([self.kernels.to_list(mark) for mark in marks])
        outcomes = self._joined_at_once(rows, overflow, outs)
        if outcomes is None:
            outcomes = self._joined_apart(rows, overflow, outs)
        self.outcomes = outcomes
        if self.late and self.far:
            self._spoil(marks)
            self._spoilt_at_once()
        if self.questions and not self.lazy:
            learn([self])
        self.traffic.codec_seconds += time.perf_counter() - began
        return outcomes

    def _overflown(self, statuses: Sequence[list[float]]) -> list[bool]:
        """Which means are infinite, as the ranks that sent them say; raises if one could not compute its own."""
        self.check_refused(statuses)
        return [max(told) >= OVERFLOW for told in zip(*statuses, strict=True)]

    def _learn_means(self, statuses: list[list[float]]) -> None:
        self._amend(self.missing, self._overflown(statuses))

    def _joined_apart(
        self, rows: Sequence[Tensor], overflow: Sequence[bool], outs: Sequence[Tensor | None]
    ) -> list[Outcome]:
        """The outcomes, variable by variable."""
        with recorder.phase("unpack", bucket=self.bucket):
            received = [wire.unpack(row) for row, wire in zip(rows, self.replies, strict=True)]
        places = range(len(self.names))
        payloads = [[shard[i] for shard in received] for i in places]
        return recorder.each("decode", self.names, self.decoding(self._joined), places, payloads, overflow, outs)

    def glance(self) -> None:
        """Places were compared before the means went round."""

    def _joined(self, i: int, payloads: list[Payload], overflow: bool, out: Tensor | None, name: str) -> Outcome:
        """One variable's mean, of the means of all shards."""
        k, variable = self.kernels, self.bucket.variables[i]
        out = k.zeros(variable.shape, "float32", payloads[0][0]) if out is None else out
        out = self.sharded.joined(payloads, self.encoded[i][1], out)
        value = k.add(out, out, float("nan")) if overflow else out
        return Outcome(variable, None if self.missing[i] else value, overflow)
