"""Subclasses that an existing object may change to."""

from typing import Any


def with_mixins(cls: type, *mixins: type, body: dict[str, Any] | None = None) -> type:
    """Return a subclass of a user's class that has its name, and finds methods in ``body`` and the mixins first.

    The user's class is its first base, ``__bases__[0]``, though the mixins override it. Python lets an object change to
    a class only if both lay out objects in memory alike, and the first base decides on the layout. If it were a mixin,
    objects whose class derives from ``ABC`` or ``Generic`` first could not change.

    Args:
        cls: the user's class.
        mixins: classes that override its methods.
        body: attributes of the new class.

    >>> import abc
    >>> class Mine(abc.ABC, dict):
    ...     pass
    >>> class Loud:
    ...     def __len__(self):
    ...         return super().__len__() + 100
    >>> mine = Mine(a=1)
    >>> mine.__class__ = with_mixins(Mine, Loud)
    >>> len(mine), type(mine).__name__
    (101, 'Mine')
    """

    class MixinsFirst(type(cls)):  # type: ignore[misc]
        def mro(self) -> list[type]:
            """Return the order in which Python looks for methods: the new class, the mixins, the user's class."""
            new, *order = super().mro()
            own = set(cls.__mro__)
            return [new, *(c for c in order if c not in own), *cls.__mro__]

    return MixinsFirst(cls.__name__, (cls, *mixins), {"__module__": cls.__module__, **(body or {})})
