"""State that is kept per variable and changes only when a whole step succeeded."""

import contextlib
from collections.abc import Iterator, MutableMapping
from typing import Any


class State(MutableMapping[str, Any]):
    """A mapping from variable name to value whose writes are staged until :meth:`commit`.

    Memories and compressors write to it as to a dict. Reads see staged writes. At the end of a step
    the exchange commits; when any rank's gradient overflowed it rolls back, so that no NaN enters
    and the step is as if it had not been (Micikevicius et al., arXiv 1710.03740: skipped steps).

    Values are arrays, numbers, or dicts of those. Of an array it may be known how to finish it, which is put off until
    somebody reads it.

    Attributes:
        unfinished: by name, what finishes values in place: objects with ``finish()``, and ``write(into)``, which is
            called before :meth:`write` writes what is staged.

    >>> s = State()
    >>> s["w"] = 1.0
    >>> s.commit()
    >>> s["w"] = float("nan")
    >>> s.rollback()
    >>> s["w"]
    1.0
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._staged: dict[str, Any] = {}
        self.unfinished: dict[str, Any] = {}

    def finish(self, *names: str) -> None:
        """Finish these values, kept and staged."""
        for name in names:
            if (one := self.unfinished.get(name)) is not None:
                one.finish()
                self.unfinished = {key: other for key, other in self.unfinished.items() if other is not one}

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """In this context values are read unfinished, by who knows what they lack."""
        unfinished, self.unfinished = self.unfinished, {}
        try:
            yield
        finally:
            self.unfinished = unfinished

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: nothing is unfinished there."""
        self.finish(*self.unfinished)
        return vars(self)

    def __getitem__(self, name: str) -> Any:
        if self.unfinished:
            self.finish(name)
        return self._staged[name] if name in self._staged else self._kept[name]

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        if self.unfinished:
            self.finish(name)
        return self._staged[name] if name in self._staged else self._kept.get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        self._staged[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._staged.pop(name, None)
        self._kept.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._staged or name in self._kept

    def __iter__(self) -> Iterator[str]:
        return iter({**self._kept, **self._staged})

    def __len__(self) -> int:
        return len({**self._kept, **self._staged})

    def __repr__(self) -> str:
        return f"State(kept={sorted(self._kept)}, staged={sorted(self._staged)})"

    def changed(self, *names: str) -> bool:
        """Whether one of them was written since the last commit."""
        return not self._staged.keys().isdisjoint(names)

    @property
    def kept(self) -> dict[str, Any]:
        """What was committed, as a dict of its own."""
        self.finish(*self.unfinished)
        return dict(self._kept)

    def commit(self) -> None:
        """Make the staged writes permanent."""
        self._kept.update(self._staged)
        self._staged.clear()

    def write(self, into: Any) -> None:
        """Let ``into(kept, staged)`` write staged arrays over the kept ones, which stay the same objects.

        >>> import numpy as np
        >>> s = State()
        >>> s["w"] = kept = np.zeros(1)
        >>> s.commit()
        >>> s["w"] = np.ones(1)
        >>> s.write(np.copyto)
        >>> float(kept[0]), s["w"] is kept
        (1.0, True)
        """
        for one in {id(one): one for name, one in self.unfinished.items() if name in self._staged}.values():
            one.write(into)
        for name, staged in self._staged.items():
            kept = self._kept[name]
            for key in staged if isinstance(staged, dict) else ():
                into(kept[key], staged[key])
            if not isinstance(staged, dict):
                into(kept, staged)
        self._staged.clear()

    def put_back(self, values: dict[str, Any], into: Any) -> None:
        """Let ``into(value, kept)`` write what is kept over these values, which were kept once and are from now on.

        Raises:
            KeyError: nothing is kept of one of these names.
        """
        changed = {name: self[name] for name, value in values.items() if self._kept.get(name) is not value}
        self._kept.update({name: values[name] for name in changed})
        self._staged.update(changed)
        self.write(into)

    def rollback(self, name: str | None = None) -> None:
        """Forget the staged writes: all of them, or those of one variable."""
        if name is None:
            self._staged.clear()
        else:
            self._staged.pop(name, None)

    def map(self, function: Any) -> None:
        """Apply ``function(array)`` to every array and number kept, dicts included."""
        self.finish(*self.unfinished)
        self.commit()
        for name, value in self._kept.items():
            if isinstance(value, dict):
                self._kept[name] = {key: function(item) for key, item in value.items()}
            else:
                self._kept[name] = function(value)
