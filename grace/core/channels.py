"""Channels: every optimizer's exchanges travel over a backend of their own.

torch.distributed and MPI pair collectives by the order in which ranks start them. The exchange of an optimizer starts
in backward on a rank that has all gradients, and in ``step()`` on one that left a layer out; so over one process group
it would be paired with whatever collective of another optimizer, or of the user's, lies between.

Channels are made by :meth:`grace.Backend.duplicate`, kept, and used again, because none can be freed by all ranks
together: optimizers end when Python collects them, at another moment on each rank. Which one is free on all ranks the
ranks find out when they compare their settings.
"""

import weakref
from collections.abc import Sequence
from typing import Any

Offer = tuple[int, dict[int, int]]
"""How many channels a rank has made, and which are free there: by number, how many collectives each has started."""


class Channels:
    """The channels of one group of ranks, by number; the same ones on each of its ranks.

    >>> from grace.core.backend import LocalBackend
    >>> channels = Channels()
    >>> first = channels.take(LocalBackend(), [channels.offer()])
    >>> other = channels.take(LocalBackend(), [channels.offer()])
    >>> channels.give_back(first)
    >>> channels.take(LocalBackend(), [channels.offer()]) is first, other is first
    (True, False)
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.taken: set[int] = set()

    def offer(self) -> Offer:
        """What this rank could use, for :meth:`take` on all ranks."""
        idle = {number: c.started for number, c in enumerate(self.made) if c.started == c.done}
        return len(self.made), {number: count for number, count in idle.items() if number not in self.taken}

    def take(self, parent: Any, offers: Sequence[Offer]) -> Any:
        """A channel that all ranks agree on: the first on which nothing is under way, and on which all ranks have
        started as many collectives; if there is none, a new one.

        Args:
            parent: the backend that it is to lie beside.
            offers: every rank's, in the order of ranks.
        """
        frees = [free for _, free in offers]
        for number, count in sorted(frees[0].items()):
            if number not in self.taken and all(free.get(number) == count for free in frees):
                self.taken.add(number)
                return self.made[number]
        self.taken.add(len(self.made))
        self.made.append(parent.duplicate())
        return self.made[-1]

    def give_back(self, channel: Any) -> None:
        """Another optimizer may use it; on which something is under way is offered to none."""
        self.taken -= {number for number, other in enumerate(self.made) if other is channel}

    def close(self) -> None:
        """Leave all of them."""
        made, self.made, self.taken = self.made, [], set()
        for channel in made:
            channel.close()


class Leases:
    """The channels that one runner uses until it ends, or is collected.

    Args:
        backend: over which the ranks compare; ``offers`` is what each of them could use.
    """

    def __init__(self, backend: Any):
        self.backend = backend
        self.offers: list[Offer] = []
        self.ends: list[weakref.finalize[..., Any]] = []

    def offer(self) -> Offer | None:
        """What this rank could use."""
        return None if self.backend.is_its_own_channel else self.backend.channels.offer()

    def take(self, another: bool = False) -> Any:
        """A channel. A backend that is its own is taken itself, or ``another`` is made beside it."""
        if self.backend.is_its_own_channel:
            return self.backend.duplicate() if another else self.backend
        channels = self.backend.channels
        channel = channels.take(self.backend, self.offers)
        self.ends.append(weakref.finalize(self, channels.give_back, channel))
        self.ends[-1].atexit = False
        return channel

    def end(self) -> None:
        """Other runners may use them."""
        for end in self.ends:
            end()
