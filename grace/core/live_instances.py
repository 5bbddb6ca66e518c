"""Objects of a class, wherever the program keeps them: models that frameworks have no list of."""

import gc
from typing import Any


def live_instances(kinds: type | tuple[type, ...]) -> list[Any]:
    """Return all instances of classes, and of their subclasses, that Python's garbage collector tracks.

    >>> class Layer:
    ...     pass
    >>> layer = Layer()
    >>> live_instances(Layer) == [layer]
    True
    """
    objects = gc.get_objects()
    # Programs have a million objects of a few thousand types, so each type is looked at once.
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [thing for thing in objects if type(thing) in found] if found else []
