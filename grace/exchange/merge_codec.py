"""The codec of ScatterMerge: it sends entries to the owners of their positions, and the largest sums back to all.

Payloads hold the entries (value, code) of all variables of the bucket, so that variations of single variables' shares
even out; they are stored as the first variable's payload. All sizes follow from shapes.

Positions of large variables are assigned to owners in blocks of W: block q has one position for each rank, in an order
rotated by a hash of q, so that every rank owns equally many, and equally many of the large entries wherever these are
(the rows of frequent words, a column). A variable of which fewer than W entries are sent is owned by one rank, the one
with the least load.

A rank numbers the positions that it owns by ``code``: q for the blocks of all large variables, one after the other,
then the positions of the small variables.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from grace.core.compressor import Compressor, Ctx, Payload, PayloadSpec, Sparsifier, Tensor, TensorSpec
from grace.errors import payload_of
from grace.exchange.bucket import Bucket
from grace.exchange.codec import PerVariableCodec
from grace.exchange.header import Flag, Header, in_range
from grace.exchange.layout import Layout, Stamps, Status
from grace.exchange.sparse_rows import Gradient
from grace.exchange.tracing import recorder
from grace.kernels import Kernels

TURN, KEEP = -1640531527, 1 << 16
"""2^32 over the golden ratio as int32, whose products wrap around, and the divisor that drops the low bits, which are
not random."""


class Place(NamedTuple):
    """Assignment of a variable to owners, and its place in their answers.

    Attributes:
        owner: the rank that owns the variable; None if every rank owns a part.
        base, codes: first code, and number of codes.
        kept: number of entries that an owner keeps.
        start: offset of these entries in the owner's answer.
    """

    owner: int | None
    base: int
    codes: int
    kept: int
    start: int


class Owners(NamedTuple):
    """Assignment of a bucket's variables to owners.

    Attributes:
        places: assignments of the variables, in their order.
        codes: number of codes.
        room: number of entries that one rank may send another; further entries stay in its memory.
        answer: number of entries in an answer.
    """

    places: tuple[Place, ...]
    codes: int
    room: int
    answer: int


def owners_of(sizes: Sequence[int], counts: Sequence[int], ranks: int) -> Owners:
    """Assign variables of these sizes, of which each rank sends ``counts`` entries, to owners.

    An owner gets k/W of a rank's k entries on average, and hardly ever more than four standard deviations above it:
    that is the room. All owners together keep k entries, up to rounding.

    >>> owners = owners_of((1000, 30), (10, 1), 2)
    >>> owners.places[0]
    Place(owner=None, base=0, codes=500, kept=5, start=0)
    >>> owners.places[1], owners.room, owners.answer
    (Place(owner=0, base=500, codes=30, kept=1, start=5), 11, 6)
    """
    loads, places = [0] * ranks, list[Place | None]([None] * len(sizes))
    codes = start = shared = 0
    for i, (n, k) in enumerate(zip(sizes, counts, strict=True)):
        if k >= ranks:  # then n >= ranks, and kept <= n // ranks excludes the last block, which may be incomplete
            kept = min(math.ceil(k / ranks), n // ranks)
            places[i] = Place(None, codes, math.ceil(n / ranks), kept, start)
            codes, start, shared = codes + math.ceil(n / ranks), start + kept, shared + k
    for i, (n, k) in enumerate(zip(sizes, counts, strict=True)):
        if k < ranks:
            owner = loads.index(min(loads))
            places[i] = Place(owner, codes, n, k, start + loads[owner])
            codes, loads[owner] = codes + n, loads[owner] + k
    mean = shared / ranks
    room = min(sum(counts), max(loads) + (shared if ranks == 1 else math.ceil(mean + 4 * math.sqrt(mean))))
    return Owners(tuple(place for place in places if place), codes, room, start + max(loads))


def _rotation(blocks: Tensor, ranks: int) -> Tensor:
    """Return the rotations of blocks. They follow from block numbers within the variable, and so not from the other
    variables of the bucket."""
    return blocks * TURN // KEEP % ranks


def coded(indices: Tensor, place: Place, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the owners and codes of a variable's positions, int32.

    >>> import numpy as np
    >>> place = owners_of((12,), (6,), 3).places[0]
    >>> owners, codes = coded(np.arange(12, dtype=np.int32), place, 3)
    >>> codes.tolist(), np.sort(owners.reshape(4, 3)).tolist()
    ([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    """
    if place.owner is not None:
        return indices * 0 + place.owner, indices + place.base
    blocks = indices // ranks
    return (indices - blocks * ranks + _rotation(blocks, ranks)) % ranks, blocks + place.base


def positions(codes: Tensor, place: Place, owner: int, ranks: int) -> Tensor:
    """Return the positions of a variable for an owner's codes, int32: the inverse of :func:`coded`.

    >>> import numpy as np
    >>> place = owners_of((12,), (6,), 3).places[0]
    >>> sorted(np.concatenate([positions(np.arange(4, dtype=np.int32), place, rank, 3) for rank in range(3)]).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    blocks = codes - place.base
    return blocks if place.owner is not None else blocks * ranks + (owner - _rotation(blocks, ranks)) % ranks


class SentEntries(Sparsifier):
    """Compressor for updates of memories: its payload is values and uncoded positions."""

    def __init__(self, inner: Compressor):
        self.traits = inner.traits

    def sent_indices(self, payload: Payload, ctx: Ctx) -> Tensor | None:
        return payload[1]


class MergeCodec(PerVariableCodec):
    """Codec that adds up entries at their owners. Memories are updated once the kept sums are known."""

    def __init__(self, bucket: Bucket, kernels: Kernels, on_device: bool = False):
        super().__init__(bucket, kernels, on_device)
        variables = self.bucket.variables
        self.counts = [self.compressor.count(variable.shape) or 0 for variable in variables]
        self.places = owners_of([variable.numel for variable in variables], self.counts, self.owners)
        self.layouts = [self._layout_of(self.places.room)] * self.owners
        self.known = [self.layouts]
        self.layout_of_means = self._layout_of(self.places.answer)
        self.entries = SentEntries(self.compressor)
        self.sent: list[tuple[Tensor, Tensor]] = []
        self.on_their_way: Tensor | None = None
        self.means_payload: Payload = []
        self.came: list[Payload] = []

    def _layout_of(self, entries: int) -> Layout:
        payload = [TensorSpec("float32", (entries,)), TensorSpec("int32", (entries,))]
        others: list[PayloadSpec] = [[] for _ in self.names[1:]]
        found = Layout(self.kernels, [payload, *others], False, self.stamps)
        found.payload_bytes = self._shares(found.total)
        return found

    def _shares(self, total: int) -> list[int]:
        """Return each variable's share of the bytes of all variables."""
        ends = [total * sent // max(1, sum(self.counts)) for sent in accumulate(self.counts, initial=0)]
        return [b - a for a, b in pairwise(ends)]

    def means_layouts(self) -> list[Layout]:
        return [self.layout_of_means] * self.owners

    # -- to the owners ---------------------------------------------------------------------------------

    def encode(self, gradients: Sequence[Tensor], header: Header) -> Tensor:
        k = self.kernels
        self.withheld = None
        self.inputs = recorder.each("compensate", self.names, self.compensated, gradients)
        self.encoded = recorder.each("compress", self.names, self.compressor.compress, self.inputs)
        header.in_range = self._in_range(header.present, [payload for payload, _ in self.encoded])
        self.sent = [(payload[0], self.compressor.sent_indices(payload, ctx)) for payload, ctx in self.encoded]
        each = [coded(i, place, self.owners) for (_, i), place in zip(self.sent, self.places.places, strict=True)]
        owners, codes = k.join([one for one, _ in each]), k.join([one for _, one in each])
        values = k.join([values for values, _ in self.sent])
        unsent: list[Tensor] = []
        shares = [self._share(owner, owners, codes, values, unsent) for owner in range(self.owners)]
        self.on_their_way = None
        if unsent:
            ones = k.zeros(tuple(values.shape), "float32", values) + 1.0
            self.on_their_way = k.zero_at(ones, k.join(unsent))
        statuses, stamps = header.statuses(), header.stamps_to_send
        nothing: list[Payload] = [[] for _ in self.names[1:]]
        return k.join([self.layouts[0].pack([share, *nothing], statuses, stamps) for share in shares])

    def _share(self, owner: int, owners: Tensor, codes: Tensor, values: Tensor, unsent: list[Tensor]) -> Payload:
        """Return the entries for one owner, padded with zeros at an unused code; add to ``unsent`` the numbers of
        entries for which there is no room."""
        k, room = self.kernels, self.places.room
        mine = k.above(k.cast(owners == owner, "float32"), 0.5)
        if mine.shape[0] > room:
            unsent.append(mine[room:])
            mine = mine[:room]
        rest = room - int(mine.shape[0])
        return [
            k.join([k.gather(values, mine), k.zeros((rest,), "float32", values)]),
            k.join([k.take_rows(codes, mine), k.zeros((rest,), "int32", codes) + self.places.codes]),
        ]

    def update_memory(self) -> None:
        """Do nothing: memories are updated in :meth:`decode`, once the kept sums are known."""

    # -- at the owner ----------------------------------------------------------------------------------

    def average(self, wires: Sequence[Tensor], layouts: Sequence[Layout], header: Header) -> list[Flag]:
        k, places = self.kernels, self.places
        # The last one takes up padding, whose code it has.
        sums = k.zeros((places.codes + 1,), "float32", wires[0])
        for rank, (layout, wire) in enumerate(zip(layouts, wires, strict=True)):
            values, codes = layout.unpack(wire)[0]
            with payload_of(rank, self.names[0]):
                sums = k.scatter_add(sums, codes, values, 1.0 / self.owners)
        found, finite = [], list[Flag]()
        for place in places.places:
            if place.owner not in (None, self.owner):
                finite.append(True)
                continue
            part = sums[place.base : place.base + place.codes]
            finite.append(in_range(k, part, [], self.memory.stateful))
            top = k.topk(part, place.kept)
            where = positions(top + place.base, place, self.owner, self.owners)
            found.append((place.start, k.gather(part, top), where))
        # Answers have the variables that all ranks own in front, and so another order than the bucket.
        found.sort(key=lambda one: one[0])
        rest = places.answer - sum(place.kept for place in places.places if place.owner in (None, self.owner))
        self.means_payload = [
            k.join([*(values for _, values, _ in found), k.zeros((rest,), "float32", sums)]),
            k.join([*(where for _, _, where in found), k.zeros((rest,), "int32", sums)]),
        ]
        return finite

    def write_means(self, statuses: list[Status], stamps: Stamps) -> tuple[Tensor, Layout]:
        nothing: list[Payload] = [[] for _ in self.names[1:]]
        return self.layout_of_means.pack([self.means_payload, *nothing], statuses, stamps), self.layout_of_means

    def update_mean_memory(self, kept: Sequence[bool]) -> None:
        """Do nothing: entries that owners drop stay in their senders' memories."""

    # -- everywhere ------------------------------------------------------------------------------------

    def decode(
        self, wires: Sequence[Tensor], layouts: Sequence[Layout], outs: Sequence[Tensor | None]
    ) -> list[Gradient]:
        self.came = [layout.unpack(wire)[0] for layout, wire in zip(layouts, wires, strict=True)]
        return recorder.each("decode", self.names, self._merged, range(len(self.names)), outs)

    def _merged(self, i: int, out: Tensor | None, name: str) -> Tensor:
        """Return one variable's mean, of the sums that its owners kept, and update its memory."""
        k, variable, place = self.kernels, self.bucket.variables[i], self.places.places[i]
        ranks = range(self.owners) if place.owner is None else [place.owner]
        cut = slice(place.start, place.start + place.kept)
        values = k.join([self.came[rank][0][cut] for rank in ranks])
        where = k.join([self.came[rank][1][cut] for rank in ranks])
        out = k.zeros(variable.shape, "float32", values) if out is None else k.zero(out)
        with payload_of(variable=name):
            total = k.scatter_add(k.flat(out), where, values, 1.0)
        with recorder.phase("update", variable=name):
            self._update_merged(i, total, name)
        return k.reshape(total, tuple(variable.shape))

    def _update_merged(self, i: int, total: Tensor, name: str) -> None:
        """Update the memory as if only those of this rank's entries were sent that are part of a kept sum."""
        k, (values, indices) = self.kernels, self.sent[i]
        sums = k.gather(total, indices)
        if self.on_their_way is not None:
            first = sum(self.counts[:i])
            sums = sums * self.on_their_way[first : first + self.counts[i]]
        # A kept sum of 0 counts as dropped: its entries stay in the memories, and still add up to 0.
        through = k.above(sums, 0.0)
        entries = [k.gather(values, through), k.take_rows(indices, through)]
        self.memory.update(self.inputs[i], name, self.entries, entries, tuple(self.bucket.variables[i].shape))
