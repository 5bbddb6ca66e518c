"""Shards of whole buckets at once: what :mod:`grace.exchange.at_once` is to an exchange with one collective, to the two
of ScatterReduce.

One call per rank encodes that rank's pieces of all variables; one decodes this rank's pieces as all ranks sent them,
and one encodes their means; one per rank decodes the means that it sent. On a GPU the pieces of all ranks are rows of
one codec, so that a launch takes all of them, and statuses stay there. The first step of a bucket, and whatever a codec
does not take, goes piece by piece, to the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grace.core.compressor import Tensor
from grace.core.memory import Memory
from grace.core.variable import equal_bounds
from grace.exchange.at_once import MOST, MOST_KEPT, AtOnce, Turns, codec_of, contiguous
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.tracing import recorder
from grace.exchange.wire import OVERFLOW, PRESENT, Wire, mark, mark_mean
from grace.kernels import Kernels


class ScatterCodec:
    """The codecs of one bucket's pieces, and the buffers that they keep.

    Args:
        exchange: a round trip of the bucket, whose shards are packed.
        kind, chosen: the class of codecs, and its options.
    """

    codec: Any
    """That of this rank's pieces."""

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
        names, mine = [variable.name for variable in bucket.variables], pieces[self.rank]
        streams = [[f"{name}/shard_{j}" for name in names] for j in range(self.size)]
        self.streams = Streams([*streams, [f"{name}/mean_{self.rank}" for name in names]])
        like = exchange.encoded[0][0][0][0]
        self.buffer = self.kernels.zeros((self.size * self.longest,), "uint8", like)
        self.reply = self.kernels.zeros((self.longest,), "uint8", like)
        self.starts = np.arange(self.size, dtype=np.uint64) * np.uint64(self.longest)
        self.ends = [j * self.longest + wire.body for j, wire in enumerate(self.wires)]
        rooms = [(n + 3) // 4 * 4 for n in mine]  # each begins where a device may read wide
        self.means = self.kernels.zeros((sum(rooms),), "float32", like)
        self.mean_offsets = np.cumsum([0, *(4 * n for n in rooms)]).astype(np.uint64)[:-1]
        self.prepare(kind, chosen, pieces)
        # what is remembered of the first compression, and of the second
        shapes, unfinished = [v.shape for v in bucket.variables], self.codec.on_device and self.codec.unfinished
        finishing, finishing_means = (self, self.codec) if unfinished else (None, None)
        self.turns = Turns(exchange.memory, self.kernels, names, shapes, finishing, self.size)
        self.mean_turns = Turns(exchange.shard_memory, self.kernels, names, [(n,) for n in mine], finishing_means)
        beside = np.arange(self.size, dtype=np.uint64)[:, None] * np.uint64(8 * len(names))
        self.apart = np.stack([*[self.offsets] * 3, *[np.broadcast_to(beside, self.offsets.shape)] * 2], axis=2)
        """How far a piece's addresses are from the variable's, by the columns of rows."""

    @classmethod
    def of(cls, exchange: Any) -> "ScatterCodec | None":
        """The codec of a bucket that is exchanged for the first time; None if its method and memories have none."""
        memories = [exchange.memory, exchange.shard_memory]
        like = exchange.encoded[0][0][0][0]
        found = codec_of(exchange.compressor, memories, exchange.kernels, exchange.bucket, like)
        if found is None or found[0].draws == "shared":  # among a whole variable's elements
            return None
        codec = (OnDevice if found[0].on_device else OnHost)(exchange, *found)
        return None if codec.kernels.addresses([codec.buffer, codec.reply], "uint8") is None else codec

    def fits(self, exchange: Any) -> bool:
        """Whether it was made for what an exchange would send."""
        context = exchange.communicator.context
        now = exchange.kernels, context.size, context.rank, exchange.room
        return now == (self.kernels, self.size, self.rank, self.room)

    def encode(
        self, gradients: Sequence[Tensor], context: Any, kept: bool, present: Sequence[bool], places: Sequence[int]
    ) -> Any:
        """Write all pieces' payloads, the statuses and places into the buffer, and the residuals into the memory's
        state; whether each variable is in range, as bools, or on its device as numbers.

        None if it cannot: nothing has changed then.
        """
        turns = self.turns
        gradients, addresses = contiguous(self.kernels, gradients)
        target = self.kernels.addresses([self.buffer], "uint8")
        if addresses is None or target is None or not turns.turn(gradients[0]):
            return None
        turns.rows[:, 0] = addresses
        streams = self.streams.of(context) if self.codec.draws else self.streams.words
        given = self.cut(turns.rows), np.uint64(target[0]), MOST_KEPT if kept else MOST, streams
        sound = self.write(*given, present, places)
        turns.keep()
        return sound

    def average(
        self,
        rows: Sequence[Tensor],
        context: Any,
        kept: bool,
        spoilt: Callable[[], Sequence[Any]],
        places: Sequence[int],
    ) -> Tensor | None:
        """Decode this rank's pieces as all ranks sent them; the reply, with the payloads of their means, the statuses
        and places, while what these leave out goes into the memory's state.

        None if it cannot, or if a payload is damaged: nothing has changed then.
        """
        codec, turns = self.codec, self.mean_turns
        sources, target = self.kernels.addresses(rows, "uint8"), self.kernels.addresses([self.reply], "uint8")
        means = self.kernels.addresses([self.means])
        if sources is None or target is None or means is None or not turns.turn(self.means):
            return None
        turns.rows[:, 0] = outs = np.uint64(means[0]) + self.mean_offsets
        if not codec.decode(outs, np.array(sources, np.uint64), self.size, context.loss_scale):
            return None
        streams = self.streams.of(context) if codec.draws else self.streams.words
        given = turns.rows, turns.factors, np.uint64(target[0]), MOST_KEPT if kept else MOST, streams[-1]
        self.write_reply(given, spoilt, sources, places)
        turns.keep()
        return self.reply

    def decode(self, outs: Sequence[Tensor], rows: Sequence[Tensor], loss_scale: float) -> bool:
        """Write all ranks' means into ``outs``; False if this cannot be done, or a payload is damaged."""
        places, sources = self.kernels.addresses(outs), self.kernels.addresses(rows, "uint8")
        if places is None or sources is None:
            return False
        return self.read(np.array(places, np.uint64) + self.offsets, np.array(sources, np.uint64), loss_scale)

    def cut(self, rows: Any) -> Any:
        """The rows of all ranks' pieces, of shape (ranks, variables, columns), of those of the variables."""
        return rows + self.apart[:, :, : rows.shape[1]] * (rows != 0)

    # -- where codecs differ ---------------------------------------------------------------------------

    def prepare(self, kind: Any, chosen: dict[str, Any], pieces: Sequence[Sequence[int]]) -> None:
        """Make the codecs of all ranks' pieces."""
        raise NotImplementedError

    def write(self, rows: Any, wire: Any, most: Any, streams: Any, present: Sequence[bool], places: Any) -> Any:
        """Encode all ranks' pieces, whose rows :meth:`cut` makes, and write the ends."""
        raise NotImplementedError

    def write_reply(self, given: Any, spoilt: Callable[[], Sequence[Any]], rows: Sequence[int], places: Any) -> None:
        """Encode the means, and write the end: whether they, and what was received at ``rows``, are in range."""
        raise NotImplementedError

    def read(self, outs: Any, sources: Any, loss_scale: float) -> bool:
        """Decode all ranks' replies into addresses of shape (ranks, variables)."""
        raise NotImplementedError


class OnHost(ScatterCodec):
    """With a codec for each rank's pieces."""

    def prepare(self, kind: Any, chosen: dict[str, Any], pieces: Sequence[Sequence[int]]) -> None:
        self.codecs = [kind(sizes, wire.placed(), **chosen) for sizes, wire in zip(pieces, self.wires, strict=True)]
        self.codec = self.codecs[self.rank]
        self.headers = [self.buffer[a : a + wire.header] for a, wire in zip(self.ends, self.wires, strict=True)]

    def write(self, rows: Any, wire: Any, most: Any, streams: Any, present: Sequence[bool], places: Any) -> list[bool]:
        factors = self.turns.factors
        found = [
            codec.encode(rows[j], factors, wire + self.starts[j], most, streams[j])
            for j, codec in enumerate(self.codecs)
        ]
        sound = [here and all(pieces) for here, *pieces in zip(present, *found, strict=True)]
        self.write_marks([mark(here, ok, False) for here, ok in zip(present, sound, strict=True)], places)
        return sound

    def write_marks(self, statuses: Sequence[Any], places: Sequence[int]) -> None:
        """Write the statuses and places behind the payloads for each rank."""
        values = self.kernels.full([*statuses, *places], "uint8", self.buffer)
        for header in self.headers:
            self.kernels.divide(header, values, 1)

    def write_reply(self, given: Any, spoilt: Callable[[], Sequence[Any]], rows: Sequence[int], places: Any) -> None:
        sound: list[bool] = self.codec.encode(*given)
        marks = [mark_mean(ok, bad) for bad, ok in zip(spoilt(), sound, strict=True)]
        self.wires[self.rank].write_marks(self.reply, marks, places)

    def read(self, outs: Any, sources: Any, loss_scale: float) -> bool:
        each = zip(self.codecs, outs, sources, strict=True)
        return all(codec.decode(out, np.array([source], np.uint64), 1, loss_scale) for codec, out, source in each)


class OnDevice(ScatterCodec):
    """With one codec, of which all ranks' pieces are rows: they are parts of one wire, the whole buffer."""

    def prepare(self, kind: Any, chosen: dict[str, Any], pieces: Sequence[Sequence[int]]) -> None:
        self.codec = kind(pieces[self.rank], self.wires[self.rank].placed(), **chosen)
        placed = [
            [tensor._replace(offset=j * self.longest + tensor.offset) for tensor in payload]
            for j, wire in enumerate(self.wires)
            for payload in wire.placed()
        ]
        self.all_of_them = kind([n for sizes in pieces for n in sizes], placed, **chosen)

    def write(self, rows: Any, wire: Any, most: Any, streams: Any, present: Sequence[bool], places: Any) -> Any:
        factors, words = np.tile(self.turns.factors, (self.size, 1)), streams[:-1].reshape(-1, 4)
        marks = [*(mark(here, True, False) for here in present), *places]
        given = np.concatenate(rows), factors, wire, most, words
        return self.all_of_them.encode(*given, (self.ends, "uint8", marks, OVERFLOW, ()))

    def finish(self, rows: Any, sides: Tensor) -> None:
        """Subtract from all pieces' residuals what is still to be subtracted."""
        self.all_of_them.finish(np.concatenate(self.cut(rows)), sides)

    def write_reply(self, given: Any, spoilt: Callable[[], Sequence[Any]], rows: Sequence[int], places: Any) -> None:
        wire = self.wires[self.rank]
        marks, heard = [*[PRESENT] * len(self.ctxs), *places], [row + wire.body for row in rows]
        self.codec.encode(*given, ([wire.body], "uint8", marks, OVERFLOW, heard))

    def read(self, outs: Any, sources: Any, loss_scale: float) -> bool:
        wires = np.repeat(sources - self.starts, outs.shape[1])[None]  # behind which a row has its place in the buffer
        done: bool = self.all_of_them.decode(outs.reshape(-1), wires, 1, loss_scale)
        return done


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
        given = gradients, self.compressor.context, self.memory.stateful, self.present, self.own_place()
        sound = codec.encode(*given)
        if sound is None:
            return False
        self.codec, self.sound, self.wires, self.longest = codec, sound, codec.wires, codec.longest
        self.encoded = [(None, ctx) for ctx in codec.ctxs]
        return True

    def _averaged_at_once(self, rows: Sequence[Tensor], spoilt: Callable[[], Sequence[Any]]) -> Tensor | None:
        """This rank's reply to what all ranks sent; None if that cannot be."""
        if self.codec is None:
            return None
        given = rows, self.compressor.context, self.shard_memory.stateful, spoilt, self.own_place()
        reply: Tensor | None = self.codec.average(*given)
        return reply

    def _joined_at_once(
        self, rows: Sequence[Tensor], overflow: Sequence[bool], outs: Sequence[Tensor | None]
    ) -> list[Outcome] | None:
        """The outcomes, of all ranks' replies; None if that cannot be."""
        variables, k = self.bucket.variables, self.kernels
        if self.codec is None:
            return None
        found = [
            k.blank(variable.shape, "float32", rows[0]) if out is None else out
            for variable, out in zip(variables, outs, strict=True)
        ]
        if not self.codec.decode(found, rows, self.compressor.context.loss_scale):
            return None
        each = zip(variables, found, self.missing, overflow, strict=True)
        return [
            Outcome(variable, None if missing else k.add(out, out, float("nan")) if spoilt else out, spoilt)
            for variable, out, missing, spoilt in each
        ]
