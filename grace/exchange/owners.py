"""Owners: which rank adds up which positions of a bucket's variables.

Positions of large variables are dealt out in blocks of W: block q gives one position to each rank, in an order that a
hash of q turns, so that every rank owns as many, and as many of the large ones wherever these lie (the rows of frequent
words, a column). Variables of which fewer than W entries are sent are owned whole, by the rank that has the least.

Among what it owns a rank numbers positions by ``code``: q for the blocks of all large variables, one behind the other,
and then the positions of the small variables.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

Array = Any
TURN, KEEP = -1640531527, 1 << 16
"""2^32 over the golden ratio as int32, whose products wrap around, and the bits below which nothing is random."""


class Place(NamedTuple):
    """Where a variable's entries are added up, and where they stand in answers.

    Attributes:
        owner: the rank that owns all of it; None if every rank owns a part.
        base, codes: the first of its codes, and how many there are.
        size: its elements.
        kept: entries that an owner keeps of it.
        start: where these begin in the owner's answer.
    """

    owner: int | None
    base: int
    codes: int
    size: int
    kept: int
    start: int


class Owners(NamedTuple):
    """The places of a bucket's variables, in their order.

    Attributes:
        ranks: how many share the positions.
        places: by variable.
        codes: how many codes there are.
        room: entries that one rank may send another; what is beyond stays in its memory.
        answer: entries in an answer.
    """

    ranks: int
    places: tuple[Place, ...]
    codes: int
    room: int
    answer: int


@lru_cache(maxsize=64)
def owners_of(sizes: tuple[int, ...], counts: tuple[int, ...], ranks: int) -> Owners:
    """Deal out variables of these sizes, of which each rank sends so many entries.

    An owner gets k/W of a rank's k entries on average, and hardly ever more than four standard deviations beyond: that
    is the room. All owners together keep k, up to rounding.

    >>> owners = owners_of((1000, 30), (10, 1), 2)
    >>> owners.places[0]
    Place(owner=None, base=0, codes=500, size=1000, kept=5, start=0)
    >>> owners.places[1], owners.room, owners.answer
    (Place(owner=0, base=500, codes=30, size=30, kept=1, start=5), 11, 6)
    """
    loads, places = [0] * ranks, list[Place | None]([None] * len(sizes))
    codes = start = shared = 0
    for i, (n, k) in enumerate(zip(sizes, counts, strict=True)):
        if k >= ranks:  # so that n >= ranks, and no owner keeps an entry of the last block that it has not
            kept = min(math.ceil(k / ranks), n // ranks)
            places[i] = Place(None, codes, math.ceil(n / ranks), n, kept, start)
            codes, start, shared = codes + math.ceil(n / ranks), start + kept, shared + k
    for i, (n, k) in enumerate(zip(sizes, counts, strict=True)):
        if k < ranks:
            owner = loads.index(min(loads))
            places[i] = Place(owner, codes, n, n, k, start + loads[owner])
            codes, loads[owner] = codes + n, loads[owner] + k
    mean = shared / ranks
    room = min(sum(counts), max(loads) + (shared if ranks == 1 else math.ceil(mean + 4 * math.sqrt(mean))))
    return Owners(ranks, tuple(place for place in places if place), codes, room, start + max(loads))


def _turned(blocks: Array, ranks: int) -> Array:
    """By how much blocks are turned, by their numbers in the variable, so that other variables beside do not matter."""
    return blocks * TURN // KEEP % ranks


def coded(indices: Array, place: Place, ranks: int) -> tuple[Array, Array]:
    """Owners and codes of positions of a variable, int32.

    >>> import numpy as np
    >>> place = owners_of((12,), (6,), 3).places[0]
    >>> owners, codes = coded(np.arange(12, dtype=np.int32), place, 3)
    >>> codes.tolist(), np.sort(owners.reshape(4, 3)).tolist()
    ([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2]])
    """
    if place.owner is not None:
        return indices * 0 + place.owner, indices + place.base
    blocks = indices // ranks
    return (indices - blocks * ranks + _turned(blocks, ranks)) % ranks, blocks + place.base


def positions(codes: Array, place: Place, owner: int, ranks: int) -> Array:
    """The positions of a variable that an owner's codes, int32, stand for: the inverse of :func:`coded`.

    >>> import numpy as np
    >>> place = owners_of((12,), (6,), 3).places[0]
    >>> sorted(np.concatenate([positions(np.arange(4, dtype=np.int32), place, rank, 3) for rank in range(3)]).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """
    blocks = codes - place.base
    return blocks if place.owner is not None else blocks * ranks + (owner - _turned(blocks, ranks)) % ranks
