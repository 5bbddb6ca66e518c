"""Step stamps: the position of each rank in training. One bucket of every step carries them with its payloads, so that
ranks detect that they are out of step before weights are updated.

A stamp is five numbers: steps exchanged; steps of the optimizer; number of times that gradients were cleared without a
step; a digest of the hyperparameters; and a check sum. Each is sent as 1 to 254, which any dtype holds exactly; 0 means
a rank that takes no part (Horovod's ``join``), and 255 a leader whose ranks are out of step among themselves. A stamp
with a wrong check sum is damaged and ignored: its payload is damaged, too, and decoding it raises an error.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.context import STAMPED, Context

STAMP_SIZE = len(STAMPED) + 1
"""Count of numbers in a stamp, the check sum included. Another size is another wire: raise ``WIRE_FORMAT`` then."""
CYCLE, OUT_OF_STEP = 254, 255
ADVICE = (
    "All ranks must make the same steps: let them decide together to leave one out (by an all-reduce of what decides), "
    "and resume them all from one checkpoint"
)


def digest(settings: Any) -> int:
    """Return a small number for settings, the same in every process.

    >>> digest((0.1, 0.9)) == digest((0.1, 0.9)), digest((0.1, 0.9)) == digest((0.01, 0.9))
    (True, False)
    """
    return zlib.crc32(repr(settings).encode()) % CYCLE


def step_stamp(context: Context) -> list[int]:
    """Return the stamp that this rank writes in its wires."""
    if context.out_of_step:
        return [OUT_OF_STEP] * STAMP_SIZE
    numbers = [1 + n % CYCLE for n in context.stamped]
    return [*numbers, _check(numbers)]


def _check(numbers: Sequence[int]) -> int:
    a, b, c, d = numbers
    return 1 + (a + 2 * b + 3 * c + 4 * d) % CYCLE


def compare_stamps(
    stamps: Sequence[Sequence[float]], context: Context, number_of: Callable[[int], int] = int
) -> tuple[str, bool]:
    """Return the reason why the ranks are out of step, and True if only their hyperparameters differ; ("", False) if
    the stamps are equal.

    Args:
        stamps: the stamps of all ranks.
        context: this rank's context.
        number_of: returns a rank's number in the run, for messages.

    >>> here = Context(step=6, rank=0, size=3)
    >>> behind = step_stamp(Context(step=5, updates=-1))
    >>> compare_stamps([step_stamp(here), behind, step_stamp(here)], here)[0].partition(". ")[0]
    'rank 1 is at step 5, ranks 0 and 2 are at step 6: rank 1 left out optimizer.step()'
    """
    mine = step_stamp(context)
    if all([theirs == mine for theirs in stamps]):
        return "", False
    found = {rank: [int(n) for n in theirs] for rank, theirs in enumerate(stamps)}
    out_of_step = [rank for rank, theirs in found.items() if context.partial and theirs == [OUT_OF_STEP] * STAMP_SIZE]
    found = {rank: theirs for rank, theirs in found.items() if rank in out_of_step or _check(theirs[:-1]) == theirs[-1]}
    if all(theirs == mine for theirs in found.values()):
        return "", False

    def call(ranks: Sequence[int]) -> str:
        return describe_ranks(list(map(number_of, ranks)), len(stamps) == context.size)

    if out_of_step:
        return f"ranks that exchange through {call(out_of_step)} went different ways; their own errors say how", False
    ahead = {rank: [_signed(a - b) for a, b in zip(theirs, mine, strict=True)] for rank, theirs in found.items()}
    first = [max(one[i] for one in ahead.values()) for i in (0, 1)]
    behind = {rank: max(first[0] - one[0], first[1] - one[1]) for rank, one in ahead.items()}
    if any(behind.values()):
        late = [rank for rank, steps in behind.items() if steps]
        steps = {rank: context.step + first[0] - steps for rank, steps in behind.items()}
        return f"{_describe_steps(steps, call)}: {call(late)} left out {context.api_names.step}. {ADVICE}", False
    least = min(one[2] for one in ahead.values())
    steps = {rank: context.step + one[2] - least for rank, one in ahead.items()}
    if any(one[2] > least for one in ahead.values()):
        early = [rank for rank, one in ahead.items() if one[2] > least]
        where = _describe_steps(steps, call)
        return f"{where}: {call(early)} called optimizer.zero_grad() and left out backward(). {ADVICE}", False
    return f"the optimizer's hyperparameters differ at step {context.step}", True


def describe_ranks(ranks: Sequence[int], known: bool = True) -> str:
    """Return rank numbers as text.

    >>> describe_ranks([1]), describe_ranks([0, 2, 3])
    ('rank 1', 'ranks 0, 2 and 3')
    """
    if not known:  # a user's own communicator may exchange with some ranks only, whose numbers are unknown
        return "a rank" if len(ranks) == 1 else "some ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _describe_steps(steps: dict[int, int], call: Any) -> str:
    """Return a description of the ranks at each step, the lowest step first."""
    at = [(step, [rank for rank in steps if steps[rank] == step]) for step in sorted(set(steps.values()))]
    return ", ".join(f"{call(ranks)} {'is' if len(ranks) == 1 else 'are'} at step {step}" for step, ranks in at)


def _signed(n: int) -> int:
    """Return the difference of numbers that start again after CYCLE, the nearest to 0."""
    return (n + CYCLE // 2) % CYCLE - CYCLE // 2
