"""Shards of whole buckets at once: what :mod:`grace.exchange.at_once` is to an exchange with one collective, to the two
of ScatterReduce.

One call per rank encodes that rank's pieces of all variables; one decodes this rank's pieces as all ranks sent them,
and one encodes their means; one per rank decodes the means that it sent. The first step of a bucket, and whatever a
codec does not take, goes piece by piece, to the same bits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.compressor import Tensor
from grace.core.memory import Memory
from grace.core.variable import equal_bounds
from grace.exchange.at_once import MOST, MOST_KEPT, AtOnce, Turns, codec_of, contiguous
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.tracing import recorder
from grace.exchange.wire import Wire, mark, mark_mean
from grace.kernels import Kernels


class ScatterCodec:
    """The codecs of one bucket's pieces, one for each rank's, and the buffers that they keep.

    Args:
        exchange: a round trip of the bucket, whose shards are packed.
        kind, chosen: the class of codecs, and its options.
    """

    def __init__(self, exchange: Any, kind: Any, chosen: dict[str, Any]):
        bucket, context = exchange.bucket, exchange.communicator.context
        self.kernels: Kernels = exchange.kernels
        self.size, self.rank, self.room = context.size, context.rank, exchange.room
        self.wires: list[Wire] = exchange.wires
        self.longest: int = exchange.longest
        self.ctxs = [ctx for _, ctx in exchange.encoded]
        self.payload_bytes = [sum(each) for each in zip(*(wire.payload_bytes for wire in self.wires), strict=True)]
        cuts = [equal_bounds(variable.numel, self.size) for variable in bucket.variables]
        pieces = [[b - a for a, b in each] for each in zip(*cuts, strict=True)]
        self.offsets = np.array([[4 * a for a, _ in each] for each in zip(*cuts, strict=True)], np.uint64)
        self.codecs = [kind(sizes, wire.placed(), **chosen) for sizes, wire in zip(pieces, self.wires, strict=True)]
        # what is remembered of the first compression, and of the second
        names, mine = [variable.name for variable in bucket.variables], pieces[self.rank]
        shapes = [variable.shape for variable in bucket.variables]
        self.turns = Turns(exchange.memory, self.kernels, names, shapes)
        self.mean_turns = Turns(exchange.shard_memory, self.kernels, names, [(n,) for n in mine])
        streams = [[f"{name}/shard_{j}" for name in names] for j in range(self.size)]
        self.streams = Streams([*streams, [f"{name}/mean_{self.rank}" for name in names]])
        like = exchange.encoded[0][0][0][0]
        self.buffer = self.kernels.zeros((self.size * self.longest,), "uint8", like)
        self.reply = self.kernels.zeros((self.longest,), "uint8", like)
        starts = [j * self.longest + wire.body for j, wire in enumerate(self.wires)]
        self.headers = [self.buffer[a : a + wire.header] for a, wire in zip(starts, self.wires, strict=True)]
        self.means = self.kernels.zeros((sum(mine),), "float32", like)
        self.mean_offsets = np.cumsum([0, *(4 * n for n in mine)]).astype(np.uint64)[:-1]

    @classmethod
    def of(cls, exchange: Any) -> "ScatterCodec | None":
        """The codec of a bucket that is exchanged for the first time; None if its method and memories have none."""
        memories = [exchange.memory, exchange.shard_memory]
        like = exchange.encoded[0][0][0][0]
        found = codec_of(exchange.compressor, memories, exchange.kernels, exchange.bucket, like)
        if found is None or found[0].on_device:  # pieces are launched one by one, and looked at on the host
            return None
        codec = cls(exchange, *found)
        return None if codec.kernels.addresses([codec.buffer, codec.reply], "uint8") is None else codec

    def fits(self, exchange: Any) -> bool:
        """Whether it was made for what an exchange would send."""
        context = exchange.communicator.context
        now = exchange.kernels, context.size, context.rank, exchange.room
        return now == (self.kernels, self.size, self.rank, self.room)

    def write_marks(self, statuses: Sequence[Any], places: Sequence[int]) -> None:
        """Write the statuses and places behind the payloads for each rank."""
        values = self.kernels.full([*statuses, *places], "uint8", self.buffer)
        for header in self.headers:
            self.kernels.divide(header, values, 1)

    def encode(self, gradients: Sequence[Tensor], context: Any, kept: bool) -> list[bool] | None:
        """Write all pieces' payloads into the buffer, and the residuals into the memory's state; whether each variable
        is in range.

        None if it cannot: nothing has changed then.
        """
        turns = self.turns
        gradients, addresses = contiguous(self.kernels, gradients)
        target = self.kernels.addresses([self.buffer], "uint8")
        if addresses is None or target is None or not turns.turn(gradients[0]):
            return None
        turns.rows[:, 0] = addresses
        given, limit, sound = turns.rows != 0, MOST_KEPT if kept else MOST, list[Sequence[bool]]()
        streams = self.streams.of(context) if self.codecs[0].draws else self.streams.words
        for j, codec in enumerate(self.codecs):
            rows = turns.rows + self.offsets[j][:, None] * given
            wire = np.uint64(target[0] + j * self.longest)
            sound.append(codec.encode(rows, turns.factors, wire, limit, streams[j]))
        turns.keep()
        return [all(pieces) for pieces in zip(*sound, strict=True)]

    def average(self, rows: Sequence[Tensor], context: Any, kept: bool) -> list[bool] | None:
        """Decode this rank's pieces as all ranks sent them, and write the payloads of their means into the reply, and
        what these leave out into the memory's state; whether each is in range.

        None if it cannot, or if a payload is damaged: nothing has changed then.
        """
        codec, turns = self.codecs[self.rank], self.mean_turns
        sources, target = self.kernels.addresses(rows, "uint8"), self.kernels.addresses([self.reply], "uint8")
        means = self.kernels.addresses([self.means])
        if sources is None or target is None or means is None or not turns.turn(self.means):
            return None
        turns.rows[:, 0] = places = np.uint64(means[0]) + self.mean_offsets
        if not codec.decode(places, np.array(sources, np.uint64), self.size, context.loss_scale):
            return None
        streams = self.streams.of(context) if codec.draws else self.streams.words
        sound: list[bool] = codec.encode(
            turns.rows, turns.factors, np.uint64(target[0]), MOST_KEPT if kept else MOST, streams[-1]
        )
        turns.keep()
        return sound

    def decode(self, outs: Sequence[Tensor], rows: Sequence[Tensor], loss_scale: float) -> bool:
        """Write all ranks' means into ``outs``; False if this cannot be done, or a payload is damaged."""
        places, sources = self.kernels.addresses(outs), self.kernels.addresses(rows, "uint8")
        if places is None or sources is None:
            return False
        whole = np.array(places, np.uint64)
        return all(
            codec.decode(whole + offsets, np.array([source], np.uint64), 1, loss_scale)
            for codec, offsets, source in zip(self.codecs, self.offsets, sources, strict=True)
        )


class Streams:
    """The words of random numbers under lists of names, whose keys stay as long as the seed and the rank do."""

    def __init__(self, names: Sequence[Sequence[str]]):
        self.names, self.made_for = names, (-1, -1)
        self.words = np.zeros((len(names), len(names[0]), 4), np.uint32)

    def of(self, context: Any) -> Any:
        """Those of this step: uint32 of shape (lists, names, 4)."""
        if self.made_for != (context.seed, context.rank):
            self.words[:] = [[context.stream(name).words for name in names] for names in self.names]
            self.made_for = context.seed, context.rank
        self.words[:, :, 2] = context.stream(self.names[0][0]).words[2]
        return self.words


class ScatterAtOnce(AtOnce):
    """A part of :class:`grace.exchange.scatter_reduce.ScatterReduceExchange`."""

    bucket: Bucket
    longest: int
    memory: Memory
    missing: list[bool]
    wires: list[Wire]
    codec: Any = None

    @property
    def shard_memory(self) -> Any:
        """That of the second compression."""
        return self.communicator.components["shard_memory"]

    def find_codec(self) -> None:
        """The bucket was encoded piece by piece: look for a codec, if there may be one."""
        codec = self.bucket.codec
        if codec is None or (codec and not codec.fits(self)):
            self.bucket.codec = ScatterCodec.of(self) or False

    def _encoded_at_once(self, gradients: Sequence[Tensor]) -> bool:
        codec = self.bucket.codec
        if not codec or recorder.active is not None or self.communicator.delayed or not codec.fits(self):
            return False
        sound = codec.encode(gradients, self.compressor.context, self.memory.stateful)
        if sound is None:
            return False
        self.codec, self.wires, self.longest = codec, codec.wires, codec.longest
        self.encoded = [(None, ctx) for ctx in codec.ctxs]
        self.sound = [here and ok for here, ok in zip(self.present, sound, strict=True)]
        marks = [mark(here, ok, False) for here, ok in zip(self.present, self.sound, strict=True)]
        codec.write_marks(marks, self.own_place())
        return True

    def _averaged_at_once(self, rows: Sequence[Tensor], overflow: Sequence[Any]) -> Tensor | None:
        """This rank's reply to what all ranks sent; None if that cannot be."""
        if self.codec is None:
            return None
        sound = self.codec.average(rows, self.compressor.context, self.shard_memory.stateful)
        if sound is None:
            return None
        marks = [mark_mean(ok, spoilt) for spoilt, ok in zip(overflow, sound, strict=True)]
        self.wires[self.codec.rank].write_marks(self.codec.reply, marks, self.own_place())
        return self.codec.reply

    def _joined_at_once(
        self, rows: Sequence[Tensor], overflow: Sequence[bool], outs: Sequence[Tensor | None]
    ) -> list[Outcome] | None:
        """The outcomes, of all ranks' replies; None if that cannot be."""
        variables, k = self.bucket.variables, self.kernels
        if self.codec is None:
            return None
        found = [
            k.zeros(variable.shape, "float32", rows[0]) if out is None else out
            for variable, out in zip(variables, outs, strict=True)
        ]
        if not self.codec.decode(found, rows, self.compressor.context.loss_scale):
            return None
        each = zip(variables, found, self.missing, overflow, strict=True)
        return [
            Outcome(variable, None if missing else k.add(out, out, float("nan")) if spoilt else out, spoilt)
            for variable, out, missing, spoilt in each
        ]
