"""Objects of a class, wherever the program keeps them: models that frameworks have no list of."""

import gc
from collections.abc import Iterator
from itertools import chain, compress, repeat, starmap
from typing import Any


def live_instances(kinds: type | tuple[type, ...]) -> list[Any]:
    """Return all instances of classes, and of their subclasses, that Python's garbage collector tracks.

    >>> class Layer:
    ...     pass
    >>> layer = Layer()
    >>> live_instances(Layer) == [layer]
    True
    """
    wanted = {id(kind) for kind in _with_subclasses(kinds if isinstance(kinds, tuple) else (kinds,))}
    collecting = gc.isenabled()
    gc.disable()  # which moves objects between generations
    try:
        # CPython raises SystemError in a thread that is filling a tuple if somebody else refers to it. So one call of C
        # lists all objects and drops the lists again: no other thread runs meanwhile. The lists hold these iterators,
        # which drop them at their ends; hence the padding, with which both iterators come to their ends.
        objects = chain(_objects(), repeat(None))
        return list(compress(objects, map(wanted.__contains__, map(id, map(type, _objects())))))
    finally:
        if collecting:
            gc.enable()


def _objects() -> Iterator[object]:
    """Return an iterator over all objects, the youngest last: where a second iterator lists more of them, these come
    last."""
    return chain.from_iterable(starmap(gc.get_objects, [(2,), (1,), (0,)]))


def _with_subclasses(kinds: tuple[type, ...]) -> Iterator[type]:
    """Yield classes and all their subclasses; some come twice."""
    for kind in kinds:
        yield kind
        yield from _with_subclasses(tuple(type.__subclasses__(kind)))
