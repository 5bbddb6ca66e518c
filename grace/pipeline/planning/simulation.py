"""Simulation of a step: when each stage computes, when its values and gradients arrive, and who waits for whom.

All replicas of a stage do the same at the same time, so the simulation has one rank for each stage. Values and
gradients travel while ranks compute; those of one border and direction travel one after the other. Ranks wait for each
other as in torch:

- all forwards first: a rank receives just before it computes, so a message travels only from then on.
- alternating: a rank ends its sends together with its next receives before it goes on, as both sides of a border do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grace.pipeline.planning.pipeline_plan import Stage
from grace.pipeline.planning.schedules import ALTERNATING, Action, actions_of


class Event(NamedTuple):
    """A computation of a stage in a simulated step, with its start and end in seconds; ``kind`` is "F" or "B"."""

    start: float
    stage: int
    end: float
    kind: str
    microbatch: int


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, without the gradients' exchange.

    Attributes:
        done: seconds until each stage has ended.
        bubble: share of :attr:`seconds` in which stages do not compute, on average.
        events: computations, in the order of their starts.
    """

    done: tuple[float, ...]
    bubble: float
    events: Sequence[Event] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        """Seconds until the last stage has ended."""
        return max(self.done)


def simulate_schedule(schedule: str, stages: Sequence[Stage], microbatches: int) -> SimulatedStep:
    """Simulate a step of a schedule, of stages with their seconds for a micro-batch.

    >>> stages = [Stage((f"n{rank}",), (rank,), forward=1.0, backward=2.0) for rank in range(2)]
    >>> simulate_schedule("gpipe", stages, microbatches=4).seconds
    15.0
    """
    return _Simulation(schedule, stages, microbatches).run()


class _Message(NamedTuple):
    """Values ("F") or gradients ("B") of a micro-batch that a stage receives."""

    kind: str
    receiver: int
    microbatch: int


class _Simulation:
    """A step under way. Each stage is a generator that runs until it has to wait for a message."""

    def __init__(self, schedule: str, stages: Sequence[Stage], microbatches: int):
        self.alternates = schedule in ALTERNATING
        self.stages = stages
        count = len(stages)
        self.actions = [actions_of(schedule, stage, count, microbatches) for stage in range(count)]
        self.clocks = [0.0] * count
        self.sent: dict[_Message, float] = {}
        """Time at which a message was ready to travel."""
        self.posted: dict[_Message, float] = {}
        """Time at which a message's receiver was ready for it."""
        self.arrived: dict[_Message, float] = {}
        self.events: list[Event] = []

    def run(self) -> SimulatedStep:
        """Run every stage as far as it gets, in turns."""
        running = [self._run_stage(stage) for stage in range(len(self.stages))]
        while running:
            running = [program for program in running if next(program, None) is not None]
        busy = sum(event.end - event.start for event in self.events)
        whole = max(self.clocks) * len(self.stages)  # 0 for profiles without seconds
        bubble = max(0.0, 1 - busy / whole) if whole else 0.0
        return SimulatedStep(tuple(self.clocks), bubble, sorted(self.events))

    def _message(self, kind: str, receiver: int, microbatch: int) -> list[_Message]:
        """Return the message of values or gradients to a stage; none to the first stage's values or the last stage's
        gradients."""
        last = len(self.stages) - 1
        exists = 0 < receiver <= last if kind == "F" else 0 <= receiver < last
        return [_Message(kind, receiver, microbatch)] if exists else []

    def _arrival(self, message: _Message) -> float | None:
        """Return the time at which a message has arrived; None while it is not known."""
        if message not in self.arrived and message in self.sent and message in self.posted:
            kind, receiver, m = message
            # messages of a border travel one after the other, in order
            former = self._arrival(_Message(kind, receiver, m - 1)) if m else 0.0
            if former is not None:
                seconds = self.stages[receiver - 1].crossing if kind == "F" else self.stages[receiver].returning
                self.arrived[message] = max(self.sent[message], self.posted[message], former) + seconds
        return self.arrived.get(message)

    def _compute(self, stage: int, action: Action) -> None:
        """Advance a stage's clock by a computation, and record it."""
        start = self.clocks[stage]
        seconds = self.stages[stage].forward if action.kind == "F" else self.stages[stage].backward
        self.clocks[stage] = start + seconds
        self.events.append(Event(start, stage, self.clocks[stage], *action))

    def _run_stage(self, stage: int) -> Iterator[int]:
        """Run a stage; yield its number while it waits."""
        unfinished: list[_Message] = []  # sends that are awaited later
        former = "F"
        for action in self.actions[stage]:
            turned, former = action.kind != former, action.kind
            if turned and not self.alternates:
                yield from self._wait(stage, unfinished)
            received = self._message(action.kind, stage, action.microbatch)
            self.posted.update(dict.fromkeys(received, self.clocks[stage]))
            yield from self._wait(stage, [*unfinished, *received] if turned else received)
            self._compute(stage, action)
            if turned or self.alternates:
                yield from self._wait(stage, unfinished)
                unfinished = []
            sent = self._message(action.kind, stage + (1 if action.kind == "F" else -1), action.microbatch)
            self.sent.update(dict.fromkeys(sent, self.clocks[stage]))
            unfinished += sent
        yield from self._wait(stage, unfinished)

    def _wait(self, stage: int, messages: Sequence[_Message]) -> Iterator[int]:
        """Wait for messages, and set the stage's clock to the last arrival."""
        while any(self._arrival(message) is None for message in messages):
            yield stage
        self.clocks[stage] = max([self.clocks[stage], *(self.arrived[message] for message in messages)])
