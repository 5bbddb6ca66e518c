"""Transactional dicts by variable name among the attributes of users' parts, which the original GRACE's parts have.

    self.residuals = {}

Such attributes become :class:`TransactionalDict`, a part of the component with a state of its own, so that they are
saved, rolled back and restored like ``self.state``.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from grace.core.component import Component, is_ours
from grace.core.state import State, Value, copied


class TransactionalDict(Component, MutableMapping[Any, Value]):
    """Dict whose tensors and numbers change only when a whole step succeeded.

    Items with other keys than names, or with other values, are in ``unsaved_items``, which no checkpoint holds.

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

    def __init__(self, default: Callable[[], object] | None = None):
        self.state = State(copies=True)
        self.default = default
        self.unsaved_items = dict[Any, Value]()

    def __getitem__(self, name: Any) -> Value:
        if name in self.unsaved_items:
            return self.unsaved_items[name]
        if name not in self.state and self.default is not None:
            self[name] = self.default()
        return self.state[name]

    def __setitem__(self, name: Any, value: Value) -> None:
        if not isinstance(name, str) or not _is_value(value):
            self.state.pop(name, None)
            self.unsaved_items[name] = value
            return
        self.unsaved_items.pop(name, None)
        # The same object is a change in place of the copy that this step already staged.
        changed_in_place = self.state.changed(name) and self.state.get(name) is value
        self.state[name] = value if changed_in_place else copied(value)

    def __delitem__(self, name: Any) -> None:
        del (self.unsaved_items if name in self.unsaved_items else self.state)[name]

    def __contains__(self, name: object) -> bool:
        return name in self.unsaved_items or name in self.state

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.state, *self.unsaved_items])

    def __len__(self) -> int:
        return len(self.state) + len(self.unsaved_items)

    def replace(self, values: dict[Any, Value]) -> None:
        """Replace all items by these."""
        for name in [name for name in self if name not in values]:
            del self[name]
        self.update(values)

    def __repr__(self) -> str:
        return f"TransactionalDict({', '.join(map(repr, self))})"

    # MutableMapping compares by items; components are told apart by identity, in sets and dicts too.
    __hash__ = Component.__hash__
    __eq__ = object.__eq__


def _is_value(value: object) -> bool:
    """Return True if a value can be saved: a tensor or a number."""
    return _is_array(value) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


class StatefulComponent(Component):
    """Component whose public attributes become :class:`TransactionalDict` when an empty dict is assigned to them, if
    its class is a user's."""

    _fingerprints: dict[str, object] | None = None
    """Fingerprints of the attributes when training began; see :meth:`unsaved`."""

    def __setattr__(self, key: str, value: object) -> None:
        if is_ours(type(self)):
            object.__setattr__(self, key, value)
            return
        if key in ("state", "context"):
            raise AttributeError(
                f"{type(self).__name__}.{key} is Grace's own: write self.state[name] = value, or use another attribute"
            )
        if isinstance(value, dict) and not key.startswith("_"):
            before = vars(self).get(key)
            # Assigned items are writes of this step, too: they are staged in the dict that is there.
            if isinstance(before, TransactionalDict):
                before.replace(value)
                return
            if not value:
                # A defaultdict keeps its factory.
                value = TransactionalDict(getattr(value, "default_factory", None))
                self.mark_stateful()
        object.__setattr__(self, key, value)

    def mark_stateful(self) -> None:
        """Note that the component has a dict, which may hold state between steps. :class:`~grace.Compressor` overrides
        it."""

    def record_attributes(self) -> None:
        """Record the attributes of a user's component when training begins, so that :meth:`unsaved` finds changes."""
        if not is_ours(type(self)):
            object.__setattr__(self, "_fingerprints", _fingerprints_of(self))

    def unsaved(self) -> list[str]:
        """Return the attributes that changed since training began and that no checkpoint holds. They are reported
        once."""
        if self._fingerprints is None:
            return []
        dicts = [(key, value) for key, value in vars(self).items() if isinstance(value, TransactionalDict)]
        with_unsaved_items = [key for key, value in dicts if value.unsaved_items]
        changed = [key for key, now in _fingerprints_of(self).items() if self._fingerprints.get(key) != now]
        found = with_unsaved_items + changed
        if found:
            object.__setattr__(self, "_fingerprints", None)
        return found

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for copies and pickles, which are not in training."""
        return {key: value for key, value in super().__getstate__().items() if key != "_fingerprints"}


def _fingerprints_of(component: Component) -> dict[str, object]:
    """Return the fingerprints of public attributes that hold numbers and tensors."""
    found = {key: _fingerprint(value) for key, value in vars(component).items() if not key.startswith("_")}
    return {key: fingerprint for key, fingerprint in found.items() if fingerprint}


def _fingerprint(value: object) -> object:
    """Return a value that differs after a change of the numbers and tensors in ``value``; empty or None if there are
    none."""
    if isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        return [fingerprint for fingerprint in map(_fingerprint, items) if fingerprint]
    if _is_array(value):
        return id(value), getattr(value, "_version", 0)  # torch counts changes in place in _version
    return (value,) if _is_value(value) else None
