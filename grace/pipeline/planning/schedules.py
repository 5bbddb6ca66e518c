"""Schedules of a pipeline, as torch.distributed.pipelining.schedules (torch 2.13) runs them, and their simulation.

gpipe    all forwards, then all backwards
1f1b     as many forwards as there are stages from here to the end, then one of each in turn

All replicas of a stage do the same at the same time, so the simulation has one rank for each stage. Values and
gradients travel while ranks compute; those of one border and direction travel one after the other. Ranks wait for each
other as in torch:

- gpipe: a rank receives just before it computes, so a message travels only from then on.
- 1f1b: a rank ends its sends together with its next receives before it goes on, and so do both sides of a border.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from grace.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b")
"""Names of torch's ScheduleGPipe and Schedule1F1B."""


class Action(NamedTuple):
    """A computation of a stage: "F" forward or "B" backward of a micro-batch."""

    kind: str
    microbatch: int


def schedule_error(schedule: str, stages: int, microbatches: int) -> str:
    """Return the reason why torch refuses a schedule; "" if it does not.

    >>> schedule_error("1f1b", 4, 2)
    '1f1b needs at least as many micro-batches as stages: 4, not 2'
    """
    if schedule not in SCHEDULES:
        return f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}"
    if schedule == "1f1b" and microbatches < stages:
        return f"1f1b needs at least as many micro-batches as stages: {stages}, not {microbatches}"
    return ""


def micro_batches_in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Return the largest number of micro-batches whose activations a stage keeps at once.

    >>> [micro_batches_in_flight("1f1b", stage, 3, 8) for stage in range(3)], micro_batches_in_flight("gpipe", 0, 2, 8)
    ([3, 2, 1], 8)
    """
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def actions_of(schedule: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    """Return the computations of a stage, in order.

    Raises:
        ConfigError: torch refuses the schedule (:func:`schedule_error`).

    >>> " ".join(f"{kind}{m}" for kind, m in actions_of("1f1b", 0, 2, 3))
    'F0 F1 B0 F2 B1 B2'
    """
    error = schedule_error(schedule, stages, microbatches)
    if error:
        raise ConfigError(error)
    first = micro_batches_in_flight(schedule, stage, stages, microbatches)
    actions = [Action("F", m) for m in range(first)]
    for m in range(microbatches):
        actions.append(Action("B", m))
        if first + m < microbatches:
            actions.append(Action("F", first + m))
    return actions


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage for one micro-batch.

    Attributes:
        forward: seconds of forward.
        backward: seconds of backward.
        there: seconds until its values are at the next stage.
        back: seconds until their gradients are here.
    """

    forward: float
    backward: float
    there: float = 0.0
    back: float = 0.0


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
        seconds: seconds until the last stage has ended.
        done: seconds until each stage has ended.
        bubble: share of ``seconds`` in which stages do not compute, on average.
        events: computations, in the order of their starts.
    """

    seconds: float
    done: tuple[float, ...]
    bubble: float
    events: Sequence[Event] = field(default=(), repr=False)


def simulate(schedule: str, stages: Sequence[StageTimes], microbatches: int) -> SimulatedStep:
    """Simulate a step.

    Args:
        schedule: one of :data:`SCHEDULES`.
        stages: seconds of each stage.
        microbatches: number of micro-batches.

    Raises:
        ConfigError: torch refuses the schedule.

    >>> simulate("gpipe", [StageTimes(1.0, 2.0)] * 2, microbatches=4).seconds
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

    def __init__(self, schedule: str, stages: Sequence[StageTimes], microbatches: int):
        self.schedule = schedule
        self.stages = stages
        count = len(stages)
        self.actions = [actions_of(schedule, stage, count, microbatches) for stage in range(count)]
        self.clocks = [0.0] * count
        self.sent: dict[_Message, float] = {}
        """Time at which a message was ready to travel."""
        self.posted: dict[_Message, float] = {}
        """Time at which a message's receiver was ready for it."""
        self.arrived: dict[_Message, float] = {}
        self.link_free: dict[tuple[str, int], float] = {}
        """Time from which a border is free, by direction and receiver."""
        self.events: list[Event] = []

    def run(self) -> SimulatedStep:
        """Run every stage as far as it gets, in turns."""
        programs = [self._run_stage(stage) for stage in range(len(self.stages))]
        running = set(range(len(self.stages)))
        while running:
            before = len(self.events), len(self.sent), len(self.posted)
            for stage in sorted(running):
                if next(programs[stage], True):
                    running.discard(stage)
            if running and before == (len(self.events), len(self.sent), len(self.posted)):
                raise ConfigError(f"{self.schedule}: stages {sorted(running)} wait for each other")
        seconds = max(self.clocks)
        busy = sum(event.end - event.start for event in self.events)
        events = sorted(self.events, key=lambda event: (event.start, event.stage, event.end))
        bubble = 1 - busy / (seconds * len(self.stages)) if seconds else 0.0
        return SimulatedStep(seconds, tuple(self.clocks), max(0.0, bubble), events)

    def _message(self, kind: str, receiver: int, microbatch: int) -> _Message | None:
        """Return the message of values or gradients to a stage; None if there is no such message."""
        last = len(self.stages) - 1
        exists = 0 < receiver <= last if kind == "F" else 0 <= receiver < last
        return _Message(kind, receiver, microbatch) if exists else None

    def _arrival(self, message: _Message) -> float | None:
        """Return the time at which a message has arrived; None while it is not known."""
        if message not in self.arrived:
            if message not in self.sent or message not in self.posted:
                return None
            kind, receiver, m = message
            if m and self._arrival(_Message(kind, receiver, m - 1)) is None:  # messages of a border keep their order
                return None
            seconds = self.stages[receiver - 1].there if kind == "F" else self.stages[receiver].back
            start = max(self.sent[message], self.posted[message], self.link_free.get((kind, receiver), 0.0))
            self.arrived[message] = self.link_free[kind, receiver] = start + seconds
        return self.arrived[message]

    def _compute(self, stage: int, action: Action) -> None:
        """Advance a stage's clock by a computation, and record it."""
        times = self.stages[stage]
        start = self.clocks[stage]
        end = start + (times.forward if action.kind == "F" else times.backward)
        self.clocks[stage] = end
        self.events.append(Event(start, stage, end, *action))

    def _run_stage(self, stage: int) -> Iterator[bool]:
        """Run a stage; yield False while it waits, and True at its end."""
        unfinished: list[_Message] = []  # sends that are awaited later
        with_next: list[_Message] = []  # sends that are awaited together with the next action's receive
        actions = self.actions[stage]
        for action, following in zip_longest(actions, actions[1:]):
            received = self._message(action.kind, stage, action.microbatch)
            if received:
                self.posted.setdefault(received, self.clocks[stage])
                with_next.append(received)
            yield from self._wait(stage, with_next)
            with_next = []
            self._compute(stage, action)
            sent = self._message(action.kind, stage + (1 if action.kind == "F" else -1), action.microbatch)
            turns = following is not None and following.kind != action.kind
            if self.schedule == "1f1b":
                yield from self._wait(stage, unfinished)
                unfinished = []
                if sent:
                    self.sent[sent] = self.clocks[stage]
                    (with_next if turns else unfinished).append(sent)
            else:
                if sent:
                    self.sent[sent] = self.clocks[stage]
                    unfinished.append(sent)
                if turns:
                    yield from self._wait(stage, unfinished)
                    unfinished = []
        yield from self._wait(stage, unfinished)
        yield True

    def _wait(self, stage: int, messages: Sequence[_Message]) -> Iterator[bool]:
        """Wait for messages, and set the stage's clock to the last arrival."""
        while any(self._arrival(message) is None for message in messages):
            yield False
        self.clocks[stage] = max([self.clocks[stage], *(self.arrived[message] for message in messages)])
