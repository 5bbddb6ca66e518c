"""Transactional state per variable: writes take effect only when a whole step succeeded."""

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np

from grace.kernels.reference import Tensor

Value = Any
"""Value of a variable in a state: an array, a number, or a dict of those."""
Values = dict[str, Value]
"""Values by the variable's name."""


def copied(value: Value) -> Value:
    """Return a copy of a tensor, or of a dict of them; the value itself if it is immutable."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    # torch's tensors have detach(), NumPy's arrays setflags(); TensorFlow's tensors are immutable, as numbers are.
    if hasattr(value, "detach"):
        return value.detach().clone()
    return value.copy() if hasattr(value, "setflags") else value


def _of_kind(before: Value, after: Value) -> Value:
    """Return an array where one is replaced: NumPy's arithmetic makes numbers of arrays without dimensions."""
    return np.asarray(after) if isinstance(before, np.ndarray) else after


class _Deleted:
    """Marker that is staged in place of a value that was deleted; a class, so that copies and pickles are the same."""


class State(MutableMapping[str, Value]):
    """A mapping from variable name to value whose writes and deletions are staged until :meth:`commit`.

    Memories and compressors write to it as to a dict. Reads see staged writes. At the end of a step
    :meth:`~grace.session.step_runner.StepRunner.commit_or_roll_back` commits; when any rank's gradient
    overflowed it rolls back, so that no NaN enters and the step is as if it had not been (Micikevicius
    et al., arXiv 1710.03740: skipped steps).

    The last computation of an array may be deferred until the array is read.

    Args:
        copies: True to copy a committed value at its first use in a step, because its reader may change it in place, as
            users' parts may.

    Attributes:
        deferred: deferred computations by name: objects with ``finish()``, which computes values in place, and
            ``write(into)``, which is called before :meth:`write` copies staged values.

    >>> s = State()
    >>> s["w"] = 1.0
    >>> s.commit()
    >>> s["w"] = float("nan")
    >>> s.rollback()
    >>> s["w"]
    1.0
    """

    def __init__(self, copies: bool = False) -> None:
        self.copies = copies
        self._committed: Values = {}
        self._staged: Values = {}
        self.deferred: dict[str, Any] = {}

    def run_deferred(self, *names: str) -> None:
        """Run the deferred computations of these values, committed and staged."""
        for name in names:
            if (one := self.deferred.get(name)) is not None:
                one.finish()
                # One computation serves all variables of a bucket. A new dict: callers may be iterating over this one.
                self.deferred = {key: other for key, other in self.deferred.items() if other is not one}

    @contextlib.contextmanager
    def without_deferred(self) -> Iterator[None]:
        """Read and write values without their deferred computations in this context. The caller must account for
        them."""
        deferred, self.deferred = self.deferred, {}
        try:
            yield
        finally:
            self.deferred = deferred

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes for copies and pickles, after all deferred computations."""
        self.run_deferred(*self.deferred)
        return vars(self)

    def __getitem__(self, name: str) -> Value:
        value = self.get(name, _Deleted)
        if value is _Deleted:
            raise KeyError(name)
        return value

    def get(self, name: str, default: Value = None) -> Value:
        """Return the value of a variable, staged or committed; ``default`` if there is none."""
        if self.deferred:
            self.run_deferred(name)
        value = self._staged.get(name, self._committed.get(name, _Deleted))
        if self.copies and name not in self._staged and value is not _Deleted:
            value = self._staged[name] = copied(value)
        return default if value is _Deleted else value

    def __setitem__(self, name: str, value: Value) -> None:
        self._staged[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self.run_deferred(name)  # a rollback brings the value back, and write() must find no computation of it
        if name in self._committed:
            self._staged[name] = _Deleted
        else:
            del self._staged[name]

    def __contains__(self, name: object) -> bool:
        # Not by get(): to look for a name must not run a computation that is deferred until the value is read.
        return isinstance(name, str) and self._staged.get(name, self._committed.get(name, _Deleted)) is not _Deleted

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, value in {**self._committed, **self._staged}.items() if value is not _Deleted])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"State(kept={sorted(self._committed)}, staged={sorted(self._staged)})"

    @property
    def in_use(self) -> bool:
        """True if a value is committed or staged, or the deletion of a committed one is staged."""
        return bool(self._committed or self._staged)

    def changed(self, *names: str) -> bool:
        """Return True if a value of one of these names was written or deleted since the last commit."""
        return not self._staged.keys().isdisjoint(names)

    @property
    def committed(self) -> Values:
        """A copy of the committed values."""
        self.run_deferred(*self.deferred)
        return dict(self._committed)

    def commit(self) -> None:
        """Make the staged writes and deletions permanent."""
        if not self._staged:
            return
        self._committed.update(self._staged)
        for name in [name for name, value in self._staged.items() if value is _Deleted]:
            del self._committed[name]
        self._staged.clear()

    def write(self, into: Callable[[Tensor, Tensor], object]) -> None:
        """Commit by ``into(committed, staged)``, which copies staged arrays over the committed ones, so that these stay
        the same objects.

        >>> import numpy as np
        >>> s = State()
        >>> s["w"] = kept = np.zeros(1)
        >>> s.commit()
        >>> s["w"] = np.ones(1)
        >>> s.write(np.copyto)
        >>> float(kept[0]), s["w"] is kept
        (1.0, True)
        """
        # Once for each computation, which stands under the names of all its variables.
        for one in {id(one): one for name, one in self.deferred.items() if name in self._staged}.values():
            one.write(into)
        for name, staged in self._staged.items():
            if staged is _Deleted:
                del self._committed[name]
                continue
            kept = self._committed[name]
            for key in staged if isinstance(staged, dict) else ():
                into(kept[key], staged[key])
            if not isinstance(staged, dict):
                into(kept, staged)
        self._staged.clear()

    def restore_arrays(self, values: Values, into: Callable[[Tensor, Tensor], object]) -> None:
        """Copy the current values into earlier arrays by ``into(value, current)``, and make these the committed ones
        again.

        Raises:
            KeyError: there is no value of one of these names.
        """
        changed = {name: self[name] for name, value in values.items() if self._committed.get(name) is not value}
        self._committed.update({name: values[name] for name in changed})
        self._staged.update(changed)
        self.write(into)

    def rollback(self, name: str | None = None) -> None:
        """Drop the staged writes and deletions: all of them, or those of one variable."""
        if name is None:
            self._staged.clear()
        else:
            self._staged.pop(name, None)

    def map(self, function: Callable[[Value], Value]) -> None:
        """Commit, and replace every array and number, dicts included, by ``function(value)``."""
        self.run_deferred(*self.deferred)
        # Committed first: a value that was only staged would escape the function.
        self.commit()
        for name, value in self._committed.items():
            if isinstance(value, dict):
                self._committed[name] = {key: _of_kind(item, function(item)) for key, item in value.items()}
            else:
                self._committed[name] = _of_kind(value, function(value))
