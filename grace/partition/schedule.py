"""A step of a pipeline played through: when each rank computes what, waits, and how much it keeps meanwhile.

All replicas of a stage do the same at the same time, so a rank here is a place in the pipeline. Values and gradients
travel beside computing, those of one boundary and direction one after the other. Ranks wait for each other as in torch:

- gpipe: a rank receives just before it computes, so what it is sent only travels from then on.
- 1f1b: a rank ends its sends together with its receives, before it goes on; both sides of a boundary do.
- The others receive as soon as something is sent, and wait where they compute with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from grace.errors import ConfigError
from grace.partition.orders import SINGLE, Action, orders, rank_of


class Event(NamedTuple):
    """Seconds from when to when a rank computes: ``what`` is "F", "B", "I" or "W"."""

    rank: int
    start: float
    end: float
    what: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Times:
    """What one stage takes for one micro-batch, in seconds.

    Attributes:
        forward, backward: of computing.
        weights: the part of backward that is for parameters alone, where it is done in two.
        there: until its values are at the next stage.
        back: until their gradients are here.
    """

    forward: float
    backward: float
    weights: float = 0.5
    there: float = 0.0
    back: float = 0.0


@dataclass(frozen=True)
class Played:
    """A step as it goes.

    Attributes:
        seconds: until the last rank is done, the gradients' exchange left out.
        done: when each rank is.
        events: what each rank computed, in the order of starts.
        bubble: part of ``seconds`` in which ranks do not compute, on average.
    """

    seconds: float
    done: tuple[float, ...]
    bubble: float
    events: Sequence[Event] = field(default=(), repr=False)


def play(schedule: str, ranks: int, stages: Sequence[Times], microbatches: int) -> Played:
    """A step under a schedule.

    Args:
        schedule: one of :data:`grace.partition.plan.SCHEDULES`.
        ranks: of the pipeline.
        stages: what each takes; a multiple of ``ranks``.
        microbatches: how many.

    Raises:
        ConfigError: torch would refuse the schedule.

    >>> play("gpipe", 2, [Times(1.0, 2.0)] * 2, microbatches=4).seconds
    15.0
    """
    return _Play(schedule, ranks, stages, microbatches).run()


def most_kept(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[tuple[int, ...]]]:
    """Micro-batches whose activations a rank keeps at once, of each of its stages; all combinations that no other one
    exceeds, since a rank with several stages keeps the most of each at different moments.

    >>> most_kept("1f1b", 3, 3, 8), most_kept("gpipe", 2, 2, 8)
    ([[(3,)], [(2,)], [(1,)]], [[(8,)], [(8,)]])
    """
    found = []
    for rank, actions in enumerate(orders(schedule, ranks, stages, microbatches)):
        own = [stage for stage in range(stages) if rank_of(schedule, stage, ranks) == rank]
        split = {action.stage for action in actions if action.kind == "W"}
        counts, peaks = dict.fromkeys(own, 0), set()
        for kind, stage, _ in actions:
            if kind == "F":
                counts[stage] += 1
                peaks.add(tuple(counts.values()))
            elif kind != "I" or stage not in split:
                counts[stage] -= 1
        found.append(sorted(a for a in peaks if not any(b != a and all(map(int.__le__, a, b)) for b in peaks)))
    return found


class _Message(NamedTuple):
    """Values ("F") that reach a stage, or gradients ("B") that do, of a micro-batch."""

    kind: str
    stage: int
    microbatch: int


class _Play:
    def __init__(self, schedule: str, ranks: int, stages: Sequence[Times], microbatches: int):
        self.schedule, self.ranks, self.stages = schedule, ranks, stages
        self.actions = orders(schedule, ranks, len(stages), microbatches)
        self.time = [0.0] * ranks
        self.sent: dict[_Message, float] = {}
        """When something was ready to travel."""
        self.asked: dict[_Message, float] = {}
        """When its receiver was ready for it."""
        self.arrived: dict[_Message, float] = {}
        self.line: dict[tuple[str, int], float] = {}
        """When a boundary is free, in one direction."""
        self.events: list[Event] = []

    def run(self) -> Played:
        """Every rank as far as it gets, in turns."""
        programs = [self._rank(rank) for rank in range(self.ranks)]
        going = set(range(self.ranks))
        while going:
            before = len(self.events), len(self.sent), len(self.asked)
            for rank in sorted(going):
                if next(programs[rank], True):
                    going.discard(rank)
            if going and before == (len(self.events), len(self.sent), len(self.asked)):
                raise ConfigError(f"{self.schedule}: ranks {sorted(going)} wait for each other")
        seconds = max(self.time)
        busy = sum(event.end - event.start for event in self.events)
        self.events.sort(key=lambda event: (event.start, event.rank, event.end))
        bubble = 1 - busy / (seconds * self.ranks) if seconds else 0.0
        return Played(seconds, tuple(self.time), max(0.0, bubble), self.events)

    # -- what travels ----------------------------------------------------------------------------------

    def _needs(self, action: Action) -> _Message | None:
        """What an action computes with, if another rank makes it."""
        kind, stage, m = action
        other = {"F": stage - 1, "B": stage + 1, "I": stage + 1, "W": -1}[kind]
        if not 0 <= other < len(self.stages) or self._same(stage, other):
            return None
        return _Message("F" if kind == "F" else "B", stage, m)

    def _makes(self, action: Action) -> _Message | None:
        kind, stage, m = action
        other = {"F": stage + 1, "B": stage - 1, "I": stage - 1, "W": -1}[kind]
        if not 0 <= other < len(self.stages) or self._same(stage, other):
            return None
        return _Message("F" if kind == "F" else "B", other, m)

    def _same(self, one: int, other: int) -> bool:
        return rank_of(self.schedule, one, self.ranks) == rank_of(self.schedule, other, self.ranks)

    def _arrival(self, message: _Message) -> float | None:
        """When it is there; None while that is not known."""
        if message not in self.arrived:
            if message not in self.sent or message not in self.asked:
                return None
            kind, stage, m = message
            if m and self._arrival(_Message(kind, stage, m - 1)) is None:  # its turn comes
                return None
            takes = self.stages[stage - 1].there if kind == "F" else self.stages[stage].back
            begin = max(self.sent[message], self.asked[message], self.line.get((kind, stage), 0.0))
            self.arrived[message] = self.line[kind, stage] = begin + takes
        return self.arrived[message]

    # -- what a rank does ------------------------------------------------------------------------------

    def _compute(self, rank: int, action: Action) -> None:
        times = self.stages[action.stage]
        takes = {
            "F": times.forward,
            "B": times.backward,
            "I": times.backward * (1 - times.weights),
            "W": times.backward * times.weights,
        }[action.kind]
        start, self.time[rank] = self.time[rank], self.time[rank] + takes
        self.events.append(Event(rank, start, self.time[rank], *action))

    def _send(self, message: _Message, at: float) -> None:
        self.sent[message] = at
        if self.schedule not in SINGLE:
            self.asked[message] = at

    def _rank(self, rank: int) -> Iterator[bool]:
        """A program that yields False while it waits, and True at its end."""
        held: list[_Message] = []  # sent, and not waited for yet
        with_next: list[_Message] = []  # waited for together with what the next action needs
        actions, in_turns = self.actions[rank], self.schedule == "1f1b"
        for action, after in zip_longest(actions, actions[1:]):
            need = self._needs(action)
            if need:
                self.asked.setdefault(need, self.time[rank])
                with_next.append(need)
            yield from self._wait(rank, with_next)
            self._compute(rank, action)
            made, with_next = self._makes(action), []
            turns = after is not None and after.kind != action.kind
            if made and not in_turns:
                self._send(made, self.time[rank])
                held.append(made)
            if in_turns or (turns and self.schedule == "gpipe"):
                yield from self._wait(rank, held)
                held = []
            if made and in_turns:
                self.sent[made] = self.time[rank]
                (with_next if turns else held).append(made)
        yield from self._wait(rank, held)
        yield True

    def _wait(self, rank: int, messages: Sequence[_Message]) -> Iterator[bool]:
        while any(self._arrival(message) is None for message in messages):
            yield False
        self.time[rank] = max([self.time[rank], *(self.arrived[message] for message in messages)])
