"""Schedules of a pipeline, as torch.distributed.pipelining.schedules (torch 2.13) runs them.

gpipe    all forwards, then all backwards
1f1b     as many forwards as there are stages from here to the end, then one of each in turn

A further one is added here, and its class to ``SCHEDULE_CLASSES`` of ``grace/pipeline/torch/point_to_point.py``. The
simulation, and the memory of stages, follow from :data:`ALTERNATING`.
"""

from typing import NamedTuple

from grace.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b")
"""Names of torch's ScheduleGPipe and Schedule1F1B."""
ALTERNATING = ("1f1b",)
"""Schedules in which forwards and backwards take turns. The others run all forwards first."""


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
    if schedule in ALTERNATING and microbatches < stages:
        return f"{schedule} needs at least as many micro-batches as stages: {stages}, not {microbatches}"
    return ""


def micro_batches_in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Return the largest number of micro-batches whose activations a stage keeps at once.

    >>> [micro_batches_in_flight("1f1b", stage, 3, 8) for stage in range(3)], micro_batches_in_flight("gpipe", 0, 2, 8)
    ([3, 2, 1], 8)
    """
    return min(microbatches, stages - stage) if schedule in ALTERNATING else microbatches


def actions_of(schedule: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    """Return the computations of a stage, in order; raise ConfigError if torch refuses the schedule.

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
