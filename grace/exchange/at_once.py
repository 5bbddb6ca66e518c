"""Whole buckets at once: where method and memory have a codec for that, one call encodes all variables of a bucket, and
another decodes them, each in one pass over memory, to the same bits as variable by variable.

The first step of a bucket goes variable by variable, which shows the layout of its wire; so does every step that is
traced, whose phases are told apart by variable, and what a codec does not take: tensors of devices that have none, and
steps that follow one that is not settled. A memory's residuals lie in two buffers that take turns: the one that holds
what is kept is not written to until the next one is kept in its place. Where a codec has to know all of x to tell what
is left of it, x lies there, and what is to be subtracted beside it: the codec does so when it reads x again, and
``finish`` does before anybody else reads it.
"""

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grace.core.compressor import Compressor, Tensor
from grace.core.kept import is_ours
from grace.core.memory import ErrorFeedback, Memory
from grace.exchange.bucket import Bucket, Outcome
from grace.exchange.tracing import recorder
from grace.exchange.wire import LARGEST, Wire, mark
from grace.kernels import Kernels

MOST, MOST_KEPT = np.finfo(np.float32).max.view(np.uint32), np.float32(LARGEST).view(np.uint32)
"""The bits of the largest numbers that are in range."""
ANY = np.uint32(0xFFFFFFFF)
"""In their place where a sum shows what is not finite: nothing is looked at."""


class Turns:
    """The residuals of some variables in two buffers that take turns, as addresses for a codec.

    Args:
        memory: whose; there are none if it keeps nothing. Or a method that keeps x itself (see :func:`moments_of`).
        names, shapes: of the variables.
        codec: what finishes residuals, if they are left unfinished; else None.
        pieces: how many each variable is cut into, of which each has its own to be subtracted.

    Attributes:
        rows: uint64 of shape (variables, 3): a column for gradients, where residuals are, where the next ones go. With
            a codec (variables, 5): and where that is which is to be subtracted from either, or from the first piece of
            either; each next piece's is behind those of all variables.
        factors: float32 of shape (variables, 2): what residuals are multiplied by, and gradients.
    """

    def __init__(
        self,
        memory: Any,
        kernels: Kernels,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        codec: Any = None,
        pieces: int = 1,
    ):
        self.memory: Any = memory if hasattr(memory, "recall") else None
        self.kernels, self.names, self.shapes, self.codec = kernels, list(names), list(shapes), codec
        self.buffers, self.places = list[list[Tensor]](), list[Any]()
        self.sides: Any = None
        """float32 of shape (3, pieces, variables, 2): for each buffer what is to be subtracted from numbers below 0,
        and from others; and zeros, for what is in neither."""
        self.pieces = pieces
        self.side_places = np.zeros((3, len(self.names)), np.uint64)
        self.before, self.after = np.zeros((2, len(self.names)), np.int64)
        self.rows = np.zeros((len(self.names), 3 if codec is None else 5), np.uint64)
        self.factors = np.ones((len(self.names), 2), np.float32)
        self.following, self.last = list[Tensor](), 0

    def turn(self, like: Tensor) -> bool:
        """Fill in where the residuals are, and where the next ones go; False if a codec cannot take them."""
        k, memory, self.following = self.kernels, self.memory, []
        if memory is None:
            return True
        if not self.buffers:
            self.buffers = [[k.zeros(shape, "float32", like) for shape in self.shapes] for _ in range(2)]
            self.places = [np.array(k.addresses(buffer), np.uint64) for buffer in self.buffers]
            if self.codec is not None:
                self.sides = k.zeros((3, self.pieces, len(self.names), 2), "float32", like)
                places = np.arange(3 * self.pieces * len(self.names), dtype=np.uint64).reshape(3, self.pieces, -1)
                self.side_places = np.uint64(k.addresses([self.sides])[0]) + 8 * places[:, 0]  # type: ignore[index]
        with memory.state.as_it_is():
            recalled = [memory.recall(name) for name in self.names]
        if memory.state.changed(*self.names):
            return False
        self.factors[:] = [(a, b) for a, _, b in recalled]
        last = self.last
        if all([residual is own for (_, residual, _), own in zip(recalled, self.buffers[last], strict=True)]):
            self.last = 1 - last
            self.rows[:, 1], self.rows[:, 2] = self.places[last], self.places[self.last]
            self.following = self.buffers[self.last]
            self.before[:], self.after[:] = last, self.last
            self._tell_sides()
            return True
        for i, (name, (_, residual, _)) in enumerate(zip(self.names, recalled, strict=True)):
            with memory.state.as_it_is():
                held = residual if residual is not None else _residual(memory.state.get(name))
            turn = int(held is self.buffers[0][i])  # the other one
            own = turn or held is self.buffers[1][i]
            self.before[i], self.after[i] = 1 - turn if own else 2, turn
            if not own:
                memory.state.finish(name)  # by whose it is
            found = None if residual is None or own else k.addresses([residual])
            if residual is None:
                self.rows[i, 1] = 0
            elif own:
                self.rows[i, 1] = self.places[1 - turn][i]
            elif found is None:
                return False
            else:
                self.rows[i, 1] = found[0]
            self.rows[i, 2] = self.places[turn][i]
            self.following.append(self.buffers[turn][i])
        self.last = int(self.following[0] is self.buffers[1][0])
        self._tell_sides()
        return True

    def _tell_sides(self) -> None:
        if self.codec is not None:
            every = range(len(self.names))
            self.rows[:, 3], self.rows[:, 4] = self.side_places[self.before, every], self.side_places[self.after, every]

    def keep(self) -> None:
        """Let the memory remember the next residuals, which have been written."""
        for name, residual in zip(self.names, self.following, strict=self.memory is not None):
            self.memory.keep(name, residual)
            if self.codec is not None:
                self.memory.state.unfinished[name] = self

    def finish(self) -> None:
        """Finish what is in either buffer: of what is, nothing is to be subtracted. See
        :class:`~grace.core.state.State`."""
        for turn in (0, 1):
            rows = np.zeros_like(self.rows)
            rows[:, 1], rows[:, 3] = self.places[turn], self.side_places[turn]
            self.codec.finish(rows, self.sides[turn])

    def write(self, into: Any) -> None:
        """The next residuals are about to be written over the kept ones: so is what is to be subtracted from them."""
        before = self.before[0]
        if before < 2 and all(self.before == before):
            into(self.sides[before], self.sides[1 - before])
        else:
            self.finish()


class BucketCodec:
    """The codec of one bucket, and the buffers that it keeps.

    Args:
        bucket: whose.
        kernels: those of its gradients.
        ctxs: what decodes its payloads, per variable, which is the same at every step.
    """

    def __init__(self, codec: Any, bucket: Bucket, kernels: Kernels, ctxs: Sequence[Any]):
        self.codec, self.kernels, self.ctxs = codec, kernels, list(ctxs)
        self.names = bucket.names
        shapes = [variable.shape for variable in bucket.variables]
        keeper = moments_of(bucket.communicator.compressor) or bucket.communicator.memory
        unfinished = codec if codec.on_device and codec.unfinished else None
        self.turns = Turns(keeper, kernels, self.names, shapes, unfinished)
        assert bucket.wire is not None
        self.wire = bucket.wire
        self.target: tuple[Tensor, Any] | None = None
        self.streams, self.drawn_for = np.zeros((len(self.names), 4), np.uint32), (-1, -1)
        self.encoded = [(None, ctx) for ctx in self.ctxs]
        self.well = [mark(True, True, self.wire.sums)] * len(self.names)

    @classmethod
    def of(cls, bucket: Bucket, kernels: Kernels, encoded: Sequence[tuple[Any, Any]]) -> "BucketCodec | None":
        """The codec of a bucket that has been exchanged once; None if its method and memory have none."""
        compressor, memory = bucket.communicator.compressor, bucket.communicator.memory
        found = codec_of(compressor, [memory], kernels, bucket, bucket.buffer)
        if found is None or bucket.wire is None or (moments_of(compressor) and memory.stateful):
            return None
        kind, chosen = found
        codec = kind([variable.numel for variable in bucket.variables], bucket.wire.placed(), **chosen)
        return cls(codec, bucket, kernels, [ctx for _, ctx in encoded])

    def fits(self, exchange: Any) -> bool:
        """Whether it was made for what an exchange would send."""
        return self.kernels is exchange.kernels and self.wire is exchange.bucket.wire

    def encode(
        self,
        gradients: Sequence[Tensor],
        compressor: Compressor,
        wire: Tensor,
        kept: bool,
        present: Sequence[bool],
        places: Sequence[int],
    ) -> Any:
        """Write the payloads, statuses and places into the wire and the next residuals; whether each variable is in
        range, as bools, or on its device as numbers.

        None if it cannot: nothing has changed then.
        """
        k, turns = self.kernels, self.turns
        gradients, addresses = contiguous(k, gradients)
        if self.target is None or self.target[0] is not wire:
            found = k.addresses([wire], self.wire.dtype)
            self.target = None if found is None else (wire, np.uint64(found[0]))
        if addresses is None or self.target is None or not turns.turn(gradients[0]):
            return None
        turns.rows[:, 0] = addresses
        if self.codec.draws:
            context = compressor.context
            if self.drawn_for != (context.seed, context.rank):
                shared = self.codec.draws == "shared"
                own = (context.stream(name, shared=shared) for name in self.names)
                self.streams[:] = [replace(stream, step=0).words for stream in own]
                self.drawn_for = context.seed, context.rank
            self.streams[:, 2] = context.step & 0xFFFFFFFF
        most = ANY if compressor.traits.carries_nonfinite else MOST_KEPT if kept else MOST
        given = turns.rows, turns.factors, self.target[1], most, self.streams
        marks = self.well if all(present) else [mark(here, True, self.wire.sums) for here in present]
        if self.codec.on_device:
            self.codec.step = compressor.context.step_there
            sound = self.codec.encode(*given, self.wire.end(marks, places))
        else:
            sound = [here and ok for here, ok in zip(present, self.codec.encode(*given), strict=True)]
            if not all(sound):
                marks = [mark(here, ok, self.wire.sums) for here, ok in zip(present, sound, strict=True)]
            self.wire.write_marks(wire, marks, places)
        return sound

    def keep(self) -> None:
        """Let the memory remember the residuals that were written."""
        self.turns.keep()

    def decode(self, outs: Sequence[Tensor], wires: Sequence[Tensor], count: float, loss_scale: float) -> bool:
        """Write the means into ``outs``; False if this cannot be done, or a payload is damaged."""
        places, sources = self.kernels.addresses(outs), self.kernels.addresses(wires, self.wire.dtype)
        if places is None or sources is None:
            return False
        well: bool = self.codec.decode(np.array(places, np.uint64), np.array(sources, np.uint64), count, loss_scale)
        return well


def codec_of(
    compressor: Compressor, memories: Sequence[Memory], kernels: Kernels, bucket: Bucket, like: Tensor
) -> tuple[Any, dict[str, Any]] | None:
    """The class and options of a method's codec where ``like`` lies; None if the method, or what remembers, has none
    for such variables."""
    if compressor.traits.exact and any(variable.dtype != "float32" for variable in bucket.variables):
        return None
    if "bucket_codec" not in vars(type(compressor)) or not all(map(_simple, memories)):
        return None
    found = compressor.bucket_codec() if kernels.codecs else None
    kind = found and importlib.import_module(kernels.codecs).CODECS.get(found[0])
    if found is None or kind is None:
        return None
    return kind, {**found[1], "device": like.device} if kind.on_device else found[1]


def moments_of(compressor: Compressor) -> Any:
    """The method if it keeps the x that it compresses, and tells as an :class:`~grace.core.memory.ErrorFeedback` does
    what x is made of; else None."""
    return compressor if hasattr(compressor, "recall") else None


def contiguous(k: Kernels, gradients: Sequence[Tensor]) -> tuple[Sequence[Tensor], list[int] | None]:
    """Gradients in float32 and contiguous, and where they are; None if a codec cannot compute with them."""
    addresses = k.addresses(gradients)
    if addresses is None:
        gradients = [k.flat(k.cast(gradient, "float32")) for gradient in gradients]
        addresses = k.addresses(gradients)
    return gradients, addresses


def _residual(held: Any) -> Any:
    """The tensor in what a memory keeps of a variable."""
    return held.get("residual") if isinstance(held, dict) else held


def _simple(memory: Memory) -> bool:
    """Whether a memory computes x = a r + g and keeps x - C(x), or nothing."""
    return is_ours(type(memory)) and (isinstance(memory, ErrorFeedback) or not memory.stateful)


class AtOnce:
    """A part of :class:`grace.exchange.base.Exchange`."""

    _codec_of_rounds: Any
    bucket: Bucket
    communicator: Any
    compressor: Compressor
    comparing: bool
    encoded: list[tuple[Any, Any]]
    kernels: Kernels
    names: list[str]
    own_place: Any
    present: list[bool]
    sound: list[Any]
    traits: Any
    wire: Wire
    codec: BucketCodec | None = None
    """That of this round trip, if it is made at once."""

    def find_codec(self) -> None:
        """The bucket was encoded for the first time: look for a codec."""
        codec = self.bucket.codec
        if self.comparing or codec is False or (codec is not None and codec.fits(self)):
            return
        one = self.traits.rounds == 1
        found = BucketCodec.of(self.bucket, self.kernels, self.encoded) if one else self._codec_of_rounds()
        self.bucket.codec = found or False

    def _encoded_at_once(self, gradients: Sequence[Tensor]) -> bool:
        """Encode by the bucket's codec; False if that cannot be, and nothing was done."""
        codec = self.bucket.codec
        if not codec or self.comparing or recorder.active is not None or self.communicator.delayed:
            return False
        if not codec.fits(self) or self.bucket.buffer is None:
            return False
        if codec.wire.sums and self.communicator.context.predivide != 1:
            return False
        kept, own = self.communicator.stateful, (self.present, self.own_place())
        sound = codec.encode(gradients, self.compressor, self.bucket.buffer, kept, *own)
        if sound is None:
            return False
        codec.keep()
        self.bucket.buffer, _ = codec.target
        self.codec, self.wire, self.encoded, self.sound = codec, codec.wire, codec.encoded, sound
        return True

    def _decoded_at_once(self, wires: Sequence[Tensor], outs: Sequence[Tensor | None]) -> list[Outcome] | None:
        """The outcomes, by the bucket's codec; None if that cannot be."""
        if self.codec is None:
            return None
        variables, k = self.bucket.variables, self.kernels
        found = [
            k.blank(variable.shape, "float32", self.bucket.buffer) if out is None else out
            for variable, out in zip(variables, outs, strict=True)
        ]
        context = self.communicator.context
        if not self.codec.decode(found, wires, context.size, context.loss_scale):
            if hasattr(self.compressor, "ctx_of"):  # which is another one at every step
                each = zip(self.names, variables, found, strict=True)
                self.encoded = [(None, self.compressor.ctx_of(name, v.shape, out)) for name, v, out in each]
            return None
        return [Outcome(variable, out, False) for variable, out in zip(variables, found, strict=True)]
