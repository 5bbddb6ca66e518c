"""The order in which each rank of a pipeline computes, as torch.distributed.pipelining.schedules (torch 2.13) has it.

gpipe         all forwards, then all backwards
1f1b          as many forwards as there are stages from here to the end, then one of each in turn
interleaved   several stages on a rank, dealt round (Narayanan et al., arXiv 2104.04473)
zero_bubble   the same, backward in two: of inputs, and of weights, which fills bubbles (ZB1P of Qi et al., arXiv
              2401.10241)
zbv           two stages on a rank, in a V: rank r has stages r and 2 P - 1 - r (the same paper)
"""

from collections.abc import Iterator
from typing import NamedTuple

from grace.errors import ConfigError
from grace.partition.plan import SCHEDULES

SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on a rank."""


class Action(NamedTuple):
    """What a rank computes: "F" forward, "B" backward, "I" backward of inputs only, "W" then of weights."""

    kind: str
    stage: int
    microbatch: int


def rank_of(schedule: str, stage: int, ranks: int) -> int:
    """The rank of a pipeline of so many that has a stage.

    >>> [rank_of("zbv", s, 2) for s in range(4)], [rank_of("interleaved", s, 2) for s in range(4)]
    ([0, 1, 1, 0], [0, 1, 0, 1])
    """
    return 2 * ranks - 1 - stage if schedule == "zbv" and stage >= ranks else stage % ranks


def check(schedule: str, ranks: int, stages: int, microbatches: int) -> str:
    """Why torch refuses to run it, or nothing.

    >>> check("1f1b", 4, 4, 2)
    '1f1b needs at least as many micro-batches as stages: 4, not 2'
    """
    if schedule not in SCHEDULES:
        return f"schedule {schedule!r} is unknown; there are {', '.join(SCHEDULES)}"
    if ranks < 1 or stages % ranks:
        return f"{stages} stages cannot be dealt to {ranks} ranks evenly"
    if schedule in SINGLE and stages != ranks:
        return f"{schedule} has one stage on a rank, not {stages // ranks}"
    if schedule == "zbv" and stages != 2 * ranks:
        return f"zbv has two stages on a rank, not {stages // ranks}"
    if schedule == "1f1b" and microbatches < stages:
        return f"1f1b needs at least as many micro-batches as stages: {stages}, not {microbatches}"
    rounds = max(1, microbatches // ranks)
    if schedule in ("interleaved", "zero_bubble") and microbatches % rounds:
        return (
            f"{schedule} over {ranks} ranks makes {rounds} rounds: {microbatches} micro-batches are no multiple of it"
        )
    return ""


def orders(schedule: str, ranks: int, stages: int, microbatches: int) -> list[list[Action]]:
    """What each rank computes, in order.

    Args:
        schedule: one of :data:`grace.partition.plan.SCHEDULES`.
        ranks: of the pipeline; those of replicas do the same.
        stages: a multiple of ``ranks``.
        microbatches: at least 1.

    Raises:
        ConfigError: torch would refuse it (:func:`check`).

    >>> " ".join(f"{kind}{m}" for kind, _, m in orders("1f1b", 2, 2, 3)[0])
    'F0 F1 B0 F2 B1 B2'
    """
    wrong = check(schedule, ranks, stages, microbatches)
    if wrong:
        raise ConfigError(wrong)
    if schedule == "zbv":
        return [_v(rank, ranks, microbatches) for rank in range(ranks)]
    if schedule in SINGLE:
        return [list(_single(schedule, rank, ranks, microbatches)) for rank in range(ranks)]
    return [list(_dealt(schedule, rank, ranks, stages // ranks, microbatches)) for rank in range(ranks)]


def _single(schedule: str, stage: int, stages: int, microbatches: int) -> Iterator[Action]:
    first = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
    for m in range(first):
        yield Action("F", stage, m)
    for m in range(microbatches):
        yield Action("B", stage, m)
        if first + m < microbatches:
            yield Action("F", stage, first + m)


def _dealt(schedule: str, rank: int, ranks: int, local: int, microbatches: int) -> Iterator[Action]:
    """torch's ``_get_1f1b_rank_ops``."""
    zero = schedule == "zero_bubble"
    a_round = microbatches // max(1, microbatches // ranks)
    total = local * microbatches
    warm = min((local - 1) * a_round + (1 if zero else 2) * (ranks - 1 - rank), total)
    counts: dict[tuple[str, int], int] = {}

    def action(kind: str, step: int) -> Action:
        chunk = step // a_round % local
        stage = (chunk if kind == "F" else local - 1 - chunk) * ranks + rank
        m = counts[kind, stage] = counts.get((kind, stage), -1) + 1
        return Action(kind, stage, m)

    weights = 0
    for step in range(total + warm):
        if step < total:
            yield action("F", step)
        if step >= warm:
            yield action("I" if zero else "B", step - warm)
            if zero and step - warm >= rank:
                yield action("W", weights)
                weights += 1
    for step in range(weights, total if zero else 0):
        yield action("W", step)


def _v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """torch's ``ScheduleZBVZeroBubble``, whose micro-batches beyond those that there are are left out."""
    stages, found, counts = (rank, 2 * ranks - 1 - rank), list[Action](), dict[tuple[str, int], int]()

    def add(*whats: tuple[str, int]) -> None:
        for kind, chunk in whats:
            m = counts[kind, chunk] = counts.get((kind, chunk), -1) + 1
            found.append(Action(kind, stages[chunk], m))

    def count(kind: str, chunk: int) -> int:
        return counts.get((kind, chunk), -1) + 1

    padded = max(2 * ranks - 1, microbatches)
    f0, f1 = ("F", 0), ("F", 1)
    back0, back1 = (("I", 0), ("W", 0)), (("I", 1), ("W", 1))
    for _ in range(2 * (ranks - rank) - 1):
        add(f0)
    for _ in range(rank):
        add(f1, f0)
    for _ in range(ranks - rank):
        add(f1, *back1)
    while count(*f1) < count(*f0) or count(*f0) < padded:
        if count(*f0) < padded:
            add(f0)
        add(*back0, f1, *back1)
    for _ in range(rank):
        add(("I", 0), ("I", 1))
    for _ in range(ranks - rank):
        add(*back0)
    while count("W", 1) < count("I", 1):
        add(("W", 1))
    while count("W", 0) < count("I", 0):
        add(("W", 0))
    return [action for action in found if action.microbatch < microbatches]
