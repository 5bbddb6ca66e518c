"""The exchange of ScatterReduce: shards to their ranks, means back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from grace.compressor import Compressor, Payload, Tensor, Traits
from grace.exchange import Exchange, Outcome
from grace.kernels import kernels_of
from grace.wire import OVERFLOW, Wire, mark


def bounds(n: int, shards: int) -> list[tuple[int, int]]:
    """Where each shard of n elements begins and ends: sizes differ by at most one, larger ones first.

    >>> bounds(5, 3)
    [(0, 2), (2, 4), (4, 5)]
    """
    small, larger = divmod(n, shards)
    starts = [i * small + min(i, larger) for i in range(shards + 1)]
    return list(pairwise(starts))


class Sharded(Compressor):
    """A compressor applied shard by shard; what a memory sees of the first compression."""

    def __init__(self, inner: Compressor, shards: int):
        self.inner, self.shards = inner, shards

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the inner compressor."""
        return self.inner.traits

    def compress(self, tensor: Tensor, name: str) -> tuple[list[Payload], Any]:
        flat = kernels_of(tensor).flat(tensor)
        cuts = bounds(flat.shape[0], self.shards)
        coded = [self.inner.compress(flat[a:b], f"{name}/shard_{j}") for j, (a, b) in enumerate(cuts)]
        return [payload for payload, _ in coded], (cuts, [ctx for _, ctx in coded])

    def decompress(self, payload, ctx):
        cuts = ctx[0]
        k = kernels_of(payload[0][0])
        return self.accumulate(payload, ctx, k.zeros((cuts[-1][1],), "float32", payload[0][0]))

    def accumulate(self, payload, ctx, out, weight=1.0):
        k = kernels_of(out)
        flat = k.flat(out)
        shards = [
            self.inner.accumulate(shard, inner_ctx, flat[a:b], weight)
            for (a, b), shard, inner_ctx in zip(ctx[0], payload, ctx[1], strict=True)
        ]
        return out if k.mutable else k.reshape(k.join(shards), tuple(out.shape))


class ScatterExchange(Exchange):
    """Two collectives: an all-to-all of compressed shards, and an all-gather of compressed means.

    The wires of all shards are padded with zeros to the longest, whose length follows from the shapes, so no
    sizes have to be exchanged.
    """

    def _start(self, gradients: Sequence[Tensor]) -> None:
        began = time.perf_counter()
        size, k = self.communicator.context.size, self.kernels
        self.sharded = Sharded(self.compressor, size)
        inputs = [self.memory.compensate(k.cast(g, "float32"), n) for g, n in zip(gradients, self.names, strict=True)]
        self.encoded = [self.sharded.compress(x, name) for x, name in zip(inputs, self.names, strict=True)]
        finite: list[Any] = [here and k.all_finite(x) for here, x in zip(self.present, inputs, strict=True)]
        marks = [mark(here, ok, False) for here, ok in zip(self.present, finite, strict=True)]
        shards = [[payload[j] for payload, _ in self.encoded] for j in range(size)]
        self.wires = [Wire(k, payloads, False) for payloads in shards]
        self.longest = max(wire.length for wire in self.wires)
        packed = [self._padded(wire, p, marks) for wire, p in zip(self.wires, shards, strict=True)]
        buffer = k.join(packed)
        for wire in self.wires:
            self._add(wire.payload_bytes)
        self.traffic.header_bytes += k.nbytes(buffer) - sum(sum(wire.payload_bytes) for wire in self.wires)
        self.traffic.codec_seconds += time.perf_counter() - began
        self.means: list[tuple[Tensor, Payload, Any]] = []
        self.means_sent = False
        self._launch(self.communicator.backend.alltoall, buffer)
        began = time.perf_counter()
        for x, name, (payload, ctx) in zip(inputs, self.names, self.encoded, strict=True):
            self.memory.update(x, name, self.sharded, payload, ctx)
        self.traffic.codec_seconds += time.perf_counter() - began

    def _padded(self, wire: Wire, payloads: list[Payload], marks: list[Any]) -> Tensor:
        buffer = wire.pack(payloads, marks)
        return self.kernels.join([buffer, self.kernels.zeros((self.longest - wire.length,), "uint8", buffer)])

    def _add(self, payload_bytes: list[int]) -> None:
        counts = self.traffic.payload_bytes
        for name, nbytes in zip(self.names, payload_bytes, strict=True):
            counts[name] = counts.get(name, 0) + nbytes

    def advance(self) -> bool:
        """Average this rank's shard and send the means round; False once that is under way."""
        if self.means_sent:
            return False
        self.wait()
        began = time.perf_counter()
        context, k = self.communicator.context, self.kernels
        wire = self.wires[context.rank]
        rows = [row[: wire.length] for row in self.handle.result()]
        statuses = [wire.statuses(row) for row in rows]
        received = [wire.unpack(row) for row in rows]
        self.missing = [all(rank[i] == 0 for rank in statuses) for i in range(len(self.names))]
        payloads, marks = [], []
        shard_memory: Any = self.communicator.components["shard_memory"]
        for i, name in enumerate(self.names):
            (a, b), ctx = self.encoded[i][1][0][context.rank], self.encoded[i][1][1][context.rank]
            mean = k.zeros((b - a,), "float32", rows[0])
            mean = self.compressor.aggregate([payload[i] for payload in received], ctx, mean, context.size)
            mean = shard_memory.compensate(mean, name)
            payload, mean_ctx = self.compressor.compress(mean, f"{name}/mean_{context.rank}")
            overflow = any(rank[i] >= OVERFLOW for rank in statuses)
            marks.append(OVERFLOW if overflow else mark(True, k.all_finite(mean), False))
            payloads.append(payload)
            self.means.append((mean, payload, mean_ctx))
        buffer = self._padded(wire, payloads, marks)
        self._add(wire.payload_bytes)
        self.traffic.header_bytes += k.nbytes(buffer) - sum(wire.payload_bytes)
        self.means_sent = True
        self.traffic.codec_seconds += time.perf_counter() - began
        self._launch(self.communicator.communicate, buffer)
        began = time.perf_counter()
        for name, (mean, payload, ctx) in zip(self.names, self.means, strict=True):
            shard_memory.update(mean, name, self.compressor, payload, ctx)
        self.traffic.codec_seconds += time.perf_counter() - began
        return True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Put the means of all shards together."""
        if wait:
            self.wait()
        began = time.perf_counter()
        k, outcomes = self.kernels, []
        rows = [row[: wire.length] for row, wire in zip(self.handle.result(), self.wires, strict=True)]
        received = [wire.unpack(row) for row, wire in zip(rows, self.wires, strict=True)]
        statuses = [wire.statuses(row) for row, wire in zip(rows, self.wires, strict=True)]
        for i, variable in enumerate(self.group.variables):
            out = outs[i]
            out = k.zeros(variable.shape, "float32", rows[0]) if out is None else k.zero(out)
            overflow = any(rank[i] >= OVERFLOW for rank in statuses)
            out = self.sharded.accumulate([payloads[i] for payloads in received], self.encoded[i][1], out)
            value = k.add(out, out, float("nan")) if overflow else out
            outcomes.append(Outcome(variable, None if self.missing[i] else value, overflow))
        self.traffic.codec_seconds += time.perf_counter() - began
        return outcomes
