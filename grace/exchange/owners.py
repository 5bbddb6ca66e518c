"""Owners: the assignment of a bucket's positions to the ranks that add them up.

Positions of large variables are assigned in blocks of W: block q has one position for each rank, in an order rotated
by a hash of q, so that every rank owns equally many, and equally many of the large entries wherever these are (the rows
of frequent words, a column). A variable of which fewer than W entries are sent is owned by one rank, the one with the
least load.

A rank numbers the positions that it owns by ``code``: q for the blocks of all large variables, one after the other,
then the positions of the small variables.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

Array = Any
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


def _rotation(blocks: Array, ranks: int) -> Array:
    """Return the rotations of blocks. They follow from block numbers within the variable, and so not from the other
    variables of the bucket."""
    return blocks * TURN // KEEP % ranks


def coded(indices: Array, place: Place, ranks: int) -> tuple[Array, Array]:
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


def positions(codes: Array, place: Place, owner: int, ranks: int) -> Array:
    """Return the positions of a variable for an owner's codes, int32: the inverse of :func:`coded`.

    >>> import numpy as np
    >>> place = owners_of((12,), (6,), 3).places[0]
    >>> sorted(np.concatenate([positions(np.arange(4, dtype=np.int32), place, rank, 3) for rank in range(3)]).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    blocks = codes - place.base
    return blocks if place.owner is not None else blocks * ranks + (owner - _rotation(blocks, ranks)) % ranks
