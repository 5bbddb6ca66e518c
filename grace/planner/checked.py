"""Documents that people or disks may have damaged: every part is looked at before it is taken."""

import math
from collections.abc import Sequence
from typing import Any

from grace.core.documents import shown
from grace.errors import ConfigError


class Checked:
    """An object of a document, whose parts are asked for by name.

    Raises:
        ConfigError: one is missing, or something else; the message begins with "is damaged".

    >>> Checked({"a": {"b": -1}}, "").part("a").seconds("b")
    Traceback (most recent call last):
    grace.errors.ConfigError: is damaged: a.b must be a number from 0 on, not -1

    Args:
        document: it.
        where: its place in the document.
    """

    def __init__(self, document: Any, where: str):
        self.document, self.where = document, where
        self.asked: set[str] = set()
        if not isinstance(document, dict):
            raise ConfigError(f"is damaged: {where or 'it'} must be an object, not {shown(document)}")

    def names(self) -> list[str]:
        """What is in it."""
        return [str(name) for name in self.document]

    def all_known(self) -> None:
        """Refuse what nobody asked for."""
        for name in self.document:
            if name not in self.asked:
                raise ConfigError(f"is damaged: {self._place(name)} is nothing that a calibration has")

    def maybe(self, name: str) -> Any:
        """Whatever is there."""
        return self._get(name)

    def part(self, name: str) -> "Checked":
        """An object in it."""
        return Checked(self._get(name), self._place(name))

    def list(self, name: str) -> list[Any]:
        """A list in it."""
        value = self._get(name)
        return value if isinstance(value, list) else self._refuse(name, "a list", value)

    def text(self, name: str) -> str:
        """A text in it."""
        value = self._get(name)
        return value if isinstance(value, str) else self._refuse(name, "text", value)

    def truth(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        return value if isinstance(value, bool) else self._refuse(name, "true or false", value)

    def whole(self, name: str, least: int) -> int:
        """A whole number in it."""
        value = self._get(name)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 53
        return value if fits else self._refuse(name, f"a whole number from {least} on", value)

    def seconds(self, name: str, least: float = 0.0) -> float:
        """A number that is not below ``least``."""
        value = self._get(name)
        return float(value) if _fits(value, least) else self._refuse(name, f"a number from {least:g} on", value)

    def all_seconds(self, names: Sequence[str] | None = None, least: float = 0.0) -> dict[str, float]:
        """These numbers, and no other; any if left out."""
        found = {name: self.seconds(name, least) for name in (self.names() if names is None else names)}
        self.all_known()
        return found

    def pair(self, name: str) -> tuple[str, int]:
        """A name and a number from 1 on."""
        value = self._get(name)
        fits = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) is int
        return (value[0], value[1]) if fits and value[1] >= 1 else self._refuse(name, "a name and a number", value)

    def _get(self, name: str) -> Any:
        self.asked.add(name)
        if name not in self.document:
            raise ConfigError(f"is damaged: {self._place(name)} is missing")
        return self.document[name]

    def _place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name

    def _refuse(self, name: str, wanted: str, value: Any) -> Any:
        raise ConfigError(f"is damaged: {self._place(name)} must be {wanted}, not {shown(value)}")


def _fits(value: Any, least: float) -> bool:
    """Whether it is a finite number that is not below another."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and least <= float(value)
    except OverflowError:
        return False
