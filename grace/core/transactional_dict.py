"""Dicts by variable name that a user's parts keep among their attributes, as the original GRACE's do.

    self.residuals = {}

They become :class:`TransactionalDict`, a part of the component with a state of its own, so that they are saved, rolled
back and restored like ``self.state``.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from grace.core.component import Component


class TransactionalDict(Component, MutableMapping[Any, Any]):
    """A dict whose tensors and numbers change only when a whole step succeeded.

    What is read may be changed in place, so it is copied at its first use in a step. What has other keys than names, or
    other values, is kept beside and is not saved.

    >>> kept = TransactionalDict()
    >>> kept["w"] = 1.0
    >>> kept.state.commit()
    >>> kept["w"] += 1
    >>> kept.state.rollback()
    >>> kept["w"], len(kept)
    (1.0, 1)
    """

    kind = "dict"
    stateful = True

    def __init__(self, default: Callable[[], Any] | None = None):
        self.default, self.beside = default, dict[Any, Any]()

    def __getitem__(self, name: Any) -> Any:
        if name in self.beside:
            return self.beside[name]
        if name not in self.state and self.default is not None:
            self[name] = self.default()
        return self.state[name] if self.state.changed(name) else self._staged(name, _copy(self.state[name]))

    def __setitem__(self, name: Any, value: Any) -> None:
        if not isinstance(name, str) or not _is_value(value):
            self.state.pop(name, None)
            self.beside[name] = value
            return
        self.beside.pop(name, None)
        mine = self.state.changed(name) and self.state[name] is value  # changed in place
        self._staged(name, value if mine else _copy(value))

    def _staged(self, name: str, value: Any) -> Any:
        self.state[name] = value
        return value

    def __delitem__(self, name: Any) -> None:
        del (self.beside if name in self.beside else self.state)[name]

    def __contains__(self, name: object) -> bool:
        return name in self.beside or name in self.state

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.state, *self.beside])

    def __len__(self) -> int:
        return len(self.state) + len(self.beside)

    def replace(self, values: dict[Any, Any]) -> None:
        """Hold these and no others."""
        for name in [name for name in self if name not in values]:
            del self[name]
        self.update(values)

    def __repr__(self) -> str:
        return f"TransactionalDict({', '.join(map(repr, self))})"

    __hash__ = Component.__hash__
    __eq__ = object.__eq__


def _is_value(value: Any) -> bool:
    """Whether it can be saved: a tensor or a number."""
    return _is_array(value) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _copy(value: Any) -> Any:
    """A tensor that nobody else can change."""
    if hasattr(value, "detach"):
        return value.detach().clone()
    return value.copy() if hasattr(value, "setflags") else value


class StatefulComponent(Component):
    """A component; if it is a user's, its public attributes that are empty dicts become :class:`TransactionalDict`."""

    _looks: dict[str, Any] | None = None
    """What was seen of its attributes when it was taken into use."""

    def __setattr__(self, key: str, value: Any) -> None:
        if is_ours(type(self)):
            object.__setattr__(self, key, value)
            return
        if key in ("state", "context"):
            raise AttributeError(
                f"{type(self).__name__}.{key} is Grace's own: write self.state[name] = value, or use another attribute"
            )
        if isinstance(value, dict) and not key.startswith("_"):
            before = vars(self).get(key)
            if isinstance(before, TransactionalDict):
                before.replace(value)
                return
            if not value:
                value = TransactionalDict(getattr(value, "default_factory", None))
                self.keeping()
        object.__setattr__(self, key, value)

    def keeping(self) -> None:
        """It has a dict, in which it may keep something from step to step."""

    def look(self) -> None:
        """It is taken into use: what changes from now on should be saved."""
        if not is_ours(type(self)):
            object.__setattr__(self, "_looks", _looks_of(self))

    def unsaved(self) -> list[str]:
        """The attributes with what changed since, and no checkpoint holds; told once."""
        if self._looks is None:
            return []
        beside = [key for key, value in vars(self).items() if isinstance(value, TransactionalDict) and value.beside]
        found = beside + [key for key, look in _looks_of(self).items() if self._looks.get(key) != look]
        if found:
            object.__setattr__(self, "_looks", None)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: these are not in use."""
        return {key: value for key, value in super().__getstate__().items() if key != "_looks"}


def is_ours(cls: type) -> bool:
    """Whether it is a part of Grace, and not a user's."""
    return cls.__module__.partition(".")[0] == "grace"


def _looks_of(component: Component) -> dict[str, Any]:
    """Of attributes that hold numbers and tensors, what is seen to change with them."""
    return {key: look for key, value in vars(component).items() if not key.startswith("_") and (look := _look(value))}


def _look(value: Any) -> Any:
    if isinstance(value, (dict, list, tuple)):
        return [look for item in (value.values() if isinstance(value, dict) else value) if (look := _look(item))]
    if _is_array(value):
        return id(value), getattr(value, "_version", 0)
    return (value,) if _is_value(value) else None
