"""Channels: every optimizer exchanges over a backend of its own.

torch.distributed and MPI pair collectives by the order in which ranks start them. The exchange of an optimizer starts
in backward on a rank that has all gradients, and in ``step()`` on a rank that left a layer out. Over one process group
it would be paired with a collective of another optimizer, or of the user, that was started between the two.

Channels are made by :meth:`grace.Backend.duplicate`, kept, and used again. They cannot be freed by all ranks together:
optimizers end when Python collects them, at another moment on each rank. When ranks compare their settings they also
compare which channels are free, and so choose the same channel.
"""

import weakref
from collections.abc import Sequence
from typing import Any

FreeChannels = tuple[int, dict[int, int]]
"""The number of channels that a rank has made, and its free ones: collectives started over each, by channel number."""


class Channels:
    """Channels of one group of ranks, by number; each rank of the group has the same ones.

    >>> from grace.core.backend import LocalBackend
    >>> channels = Channels()
    >>> first = channels.acquire(LocalBackend(), [channels.free_channels()])
    >>> other = channels.acquire(LocalBackend(), [channels.free_channels()])
    >>> channels.release(first)
    >>> channels.acquire(LocalBackend(), [channels.free_channels()]) is first, other is first
    (True, False)
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.taken: set[int] = set()

    def free_channels(self) -> FreeChannels:
        """Return the channels that are free on this rank, which :meth:`acquire` needs from all ranks."""
        idle = {number: c.started for number, c in enumerate(self.made) if c.started == c.done}
        return len(self.made), {number: count for number, count in idle.items() if number not in self.taken}

    def acquire(self, parent: Any, free_of_ranks: Sequence[FreeChannels]) -> Any:
        """Return a channel that all ranks agree on: the first that is free on all ranks and over which all ranks have
        started equally many collectives; a new channel if there is none.

        Args:
            parent: the backend that new channels are duplicated from.
            free_of_ranks: the free channels of every rank, in the order of ranks.
        """
        frees = [free for _, free in free_of_ranks]
        # In one order, so that all ranks find the same channel.
        for number, count in sorted(frees[0].items()):
            if number not in self.taken and all(free.get(number) == count for free in frees):
                self.taken.add(number)
                return self.made[number]
        self.taken.add(len(self.made))
        self.made.append(parent.duplicate())
        return self.made[-1]

    def release(self, channel: Any) -> None:
        """Let other optimizers use a channel. It counts as free once none of its collectives is under way."""
        self.taken -= {number for number, other in enumerate(self.made) if other is channel}

    def close(self) -> None:
        """Close all channels."""
        made, self.made, self.taken = self.made, [], set()
        for channel in made:
            channel.close()


class Leases:
    """Channels that one runner uses until it ends or is garbage-collected.

    Args:
        backend: the backend that channels are duplicated from.

    Attributes:
        free_of_ranks: the free channels of every rank. Set once the ranks have compared their settings.
        ends: finalizers that release the channels of this runner.
    """

    def __init__(self, backend: Any):
        self.backend = backend
        self.free_of_ranks: list[FreeChannels] = []
        self.ends: list[weakref.finalize[..., Any]] = []

    def free_channels(self) -> FreeChannels | None:
        """Return the channels that are free on this rank; None if the backend is its own channel."""
        return None if self.backend.is_its_own_channel else self.backend.channels.free_channels()

    def acquire(self, another: bool = False) -> Any:
        """Return a channel for this runner. A backend that is its own channel is returned itself, or duplicated if
        ``another`` is True."""
        if self.backend.is_its_own_channel:
            return self.backend.duplicate() if another else self.backend
        channels = self.backend.channels
        channel = channels.acquire(self.backend, self.free_of_ranks)
        self.ends.append(weakref.finalize(self, channels.release, channel))
        self.ends[-1].atexit = False  # at exit no other runner needs the channel
        return channel

    def release(self) -> None:
        """Release all channels of this runner."""
        for end in self.ends:
            end()
