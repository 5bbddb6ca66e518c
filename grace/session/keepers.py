"""The parts that keep state, found once where they cannot change."""

from grace.core.communicator import Communicator
from grace.core.component import Component
from grace.core.kept import is_ours


class Keepers:
    """The keepers of communicators; looked for again where a part that a user has written may have got others.

    >>> from grace.communicators import Allgather
    >>> keepers, topk = Keepers(), Allgather("topk")
    >>> [part.name for part in keepers.of(topk)], keepers.of(topk) is keepers.of(topk)
    (['topk', 'residual'], True)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[int], list[Component]]] = {}

    def of(self, communicator: Communicator) -> list[Component]:
        """As ``communicator.keepers``."""
        parts = list(communicator.components.values())
        numbers = [id(part) for part in parts]
        known = self._known.get(id(communicator))
        if known is not None and known[0] == numbers:
            return known[1]
        keepers = list(communicator.keepers.values())
        if all(is_ours(type(one)) for part in parts for one in part.whole().values()):
            self._known[id(communicator)] = numbers, keepers  # which hold the parts, so that their numbers stay theirs
        return keepers
