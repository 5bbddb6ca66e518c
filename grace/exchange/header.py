"""The header of a wire: the statuses and step stamps that ranks send with payloads, and their evaluation.

Behind the payloads stands a status of each variable:

- in byte wires 0 (missing: this rank has no gradient), 1 (present), 2 (overflow: it is not finite), 3 (refused: this
  rank could not decode what it was sent, or has no payload that fits);
- in summed wires 0, 1, Inf and NaN: the sum over ranks is 0 if all lack the gradient, Inf if one overflowed, and NaN if
  one refused.

Behind the statuses, in one bucket of each step, stands the step stamp of each rank, so that ranks detect that they are
out of step before weights are updated (hyperparameters are those of the last update: a learning rate that differs is
found a step later). A stamp is five numbers: steps exchanged; steps of the optimizer; number of times that gradients
were cleared without a step; a digest of the hyperparameters; and a check sum. Each is sent as 1 to 254, which any dtype
holds exactly; 0 means a rank that takes no part (Horovod's ``join``), and 255 a leader whose ranks are out of step
among themselves. The digest is mixed with the step: of 254 differences one hides in a step, and shows in the next. A
stamp with a wrong check sum is damaged and ignored: its payload is damaged, too, and decoding it raises an error. If
one wire carries the stamps of all ranks (a sum, a root's answer), each rank has a place of its own, in which all others
write 0.

On a CPU a header is read when it arrives. On a device it stays there: the round trip continues as if no status were
bad, and :func:`resolve_headers` reads the headers of all of a step's round trips at once.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.context import AnyContext, Context
from grace.exchange.bucket import Bucket
from grace.exchange.layout import Layout, Stamps, Status
from grace.kernels import Kernels, kernels_of

MISSING, PRESENT, OVERFLOW, REFUSED = 0, 1, 2, 3
# Code for devices computes with these numbers, so that another status concerns add_poison, MeanEncoder's
# _statuses_on_device, Layout.device_header and in_range_flags of CUDA graphs, too; nodes send statuses of their own.
CYCLE, OUT_OF_STEP = 254, 255
ADVICE = (
    "All ranks must make the same steps: let them decide together to leave one out (by an all-reduce of what decides), "
    "and resume them all from one checkpoint"
)
LARGEST_KEPT = 2.0**95
"""Largest magnitude that a memory accepts: residuals stay finite even if a method decodes to 2^31 times its input
(random-k, unbiased), and sums over ranks to more."""


class StepStamp(NamedTuple):
    """Step stamp of a rank as it travels: numbers of 1 to 254, or zeros, or :data:`APART`.

    A further number makes another wire: raise ``WIRE_FORMAT`` with it (docs/adding.md).

    Attributes:
        step: steps exchanged.
        updates: steps of the optimizer.
        cleared: number of times that gradients were cleared without a step.
        hyperparameters: a digest of the hyperparameters, mixed with the step.
        check_sum: the check sum of the others.
    """

    step: int
    updates: int
    cleared: int
    hyperparameters: int
    check_sum: int

    @property
    def damaged(self) -> bool:
        """True if the check sum is wrong."""
        return self.check_sum != _check_sum(*self[:-1])


STAMP_SIZE = len(StepStamp._fields)
APART = StepStamp(*[OUT_OF_STEP] * STAMP_SIZE)
"""Stamp of a leader whose ranks are out of step among themselves."""
Call = Callable[[Sequence[int]], str]
"""Function that calls ranks by their numbers, for messages."""
Flag = bool | Tensor
"""Truth: a bool, or on a device a 0-d tensor of 1.0 or 0.0."""


class DeferredRead(NamedTuple):
    """Read of small tensors on a device, for later.

    Attributes:
        tensors: the tensors.
        then: the function that takes their numbers.
        expected: the number that each holds if all ranks have a gradient in range; None for a flag, which is 1 then.
    """

    tensors: list[Tensor]
    then: Callable[[list[list[float]]], object]
    expected: Sequence[float | None]


def resolve_headers(round_trips: Sequence[Any]) -> None:
    """Run all reads that the headers of round trips have deferred, in one copy.

    Raises:
        PayloadError: a rank could not decode a payload.
    """
    deferred_reads: list[DeferredRead] = []
    for trip in round_trips:
        if trip.header.deferred_reads:
            deferred_reads += trip.header.deferred_reads
            trip.header.deferred_reads = []
    if deferred_reads:
        tensors = [tensor for deferred in deferred_reads for tensor in deferred.tensors]
        numbers = kernels_of(tensors[0]).read(tensors)
        for deferred in deferred_reads:
            count = len(deferred.tensors)
            deferred.then(numbers[:count])
            del numbers[:count]


def status(present: bool, finite: Flag, sums: bool) -> Status:
    """Return the status of one variable on this rank, a number or a 0-d tensor.

    >>> status(True, True, sums=False), status(True, False, sums=False), status(False, True, sums=True)
    (1, 2, 0)
    """
    if not present:
        return MISSING
    if not isinstance(finite, bool):
        return 1.0 / finite if sums else 2.0 - finite
    if finite:
        return PRESENT
    return math.inf if sums else OVERFLOW


def in_range(k: Kernels, tensor: Tensor, payload: Sequence[Tensor], kept: bool, known: Flag | None = None) -> Flag:
    """Return True if a tensor and all numbers of its payload are finite.

    Methods add, scale and round, so that the payload of a finite tensor may not be finite.

    Args:
        kept: True if a memory keeps something of the tensor; then more than :data:`LARGEST_KEPT` counts as infinite.
        known: the result for the tensor alone, if the caller has it.
    """
    found = k.all_finite(tensor, LARGEST_KEPT if kept else math.inf) if known is None else known
    for part in payload:
        if "float" in k.dtype(part):
            found = logical_and(found, k.all_finite(part))
    return found


def logical_and(one: Flag, other: Flag) -> Flag:
    """Return True if both hold."""
    if isinstance(one, bool):
        return one and other
    return one if other is True else one * other


def shares_stamps(communicator: Communicator) -> bool:
    """Return True if one wire has room for the step stamps of all ranks: a sum, or the answer of a root."""
    return communicator.sums or communicator.rooted


def stamp_numbers(bucket: Bucket) -> int:
    """Return the number of step stamp numbers in a bucket's wires."""
    if not bucket.carries_stamps:
        return 0
    communicator = bucket.communicator
    return STAMP_SIZE * (communicator.context.size if shares_stamps(communicator) else 1)


class Header:
    """Statuses and step stamp that this rank writes in one round trip, and facts that it reads from those of all ranks.

    Args:
        program: the bucket's :class:`~grace.exchange.round_trip.BucketProgram`, which has all that never changes: a
            header is made at every step.
        present: True for each variable that this rank has a gradient of.

    Attributes:
        stamps_to_send: this rank's stamp, with zeros in the places of other ranks where a wire has these.
        in_range: True for each variable whose gradient is in range on this rank.
        missing, overflowed: True for each variable that no rank has a gradient of, and that overflowed on a rank, as
            far as it was read.
        refused: the rank and the variable of a payload that was refused or withheld, as far as it was read.
        out_of_step: why the ranks cannot go on together; empty if they can.
        hyperparameters_differ: True if only the optimizers' hyperparameters differ.
        deferred_reads: the reads that are deferred.
        received_stamps: all ranks' stamps, as they came.
        poison: NaN for each variable that overflowed, on the device; -0, which changes no number, for all others.
    """

    refused: tuple[int, str] | None = None
    out_of_step: str = ""
    hyperparameters_differ: bool = False
    deferred_reads: Sequence[DeferredRead] = ()
    received_stamps: Stamps = ()
    poison: Tensor | None = None

    def __init__(self, program: Any, present: Sequence[bool]):
        self.program = program
        self.kernels = program.kernels
        self.context = program.context
        self.sums = program.sums
        self.on_device = program.on_device
        self.names = program.bucket.names
        self.present = present
        self.in_range: Sequence[Flag] = program.all_true
        self.missing = program.all_false
        self.overflowed = program.all_false
        self.own_stamp = step_stamp(self.context) if program.bucket.carries_stamps else ()
        self.stamps_to_send: Sequence[int] = self.own_stamp
        if program.shares_stamps and self.own_stamp:
            rank, size = self.context.rank, self.context.size
            self.stamps_to_send = [*[0] * STAMP_SIZE * rank, *self.own_stamp, *[0] * STAMP_SIZE * (size - 1 - rank)]
        self.statuses_matter = program.statuses_matter or not all(present)
        """True if statuses say more than payloads do."""

    # -- writing ---------------------------------------------------------------------------------------

    def statuses(self, later_round: bool = False) -> list[Status]:
        """Return this rank's status of each variable. Overflows of a later round show in its sum instead."""
        finite = self.program.all_true if later_round else self.in_range
        if all(self.present) and all([ok is True for ok in finite]):  # a tensor is not True: it is not read here
            return self.program.all_present
        return [status(here, ok, self.sums) for here, ok in zip(self.present, finite, strict=True)]

    # -- step stamps -----------------------------------------------------------------------------------

    def compare_stamps(self, layouts: Sequence[Layout], wires: Sequence[Tensor]) -> bool:
        """Compare the step stamps in wires; return True if the ranks are known not to be able to go on together."""
        # One report is enough: later rounds carry the same stamps.
        if not self.own_stamp or self.out_of_step or self.hyperparameters_differ:
            return bool(self.out_of_step)
        stamps = [wire[layout.stamps] for layout, wire in zip(layouts, wires, strict=True)]
        context = self.context
        if self.on_device:
            self.received_stamps = sum(stamps) if self.program.shares_stamps and len(stamps) > 1 else stamps[0]
            # The context goes on before the stamps are read.
            context = dataclasses.replace(context) if isinstance(context, Context) else context
        self.read(stamps, partial(self._compare_received, context))
        return bool(self.out_of_step)

    def _compare_received(self, context: Any, found: list[list[float]]) -> None:
        numbers = found[0]
        if len(found) > 1 and self.program.shares_stamps:
            numbers = [sum(of_all) for of_all in zip(*found, strict=True)]
        elif len(found) > 1:
            numbers = [n for one in found for n in one]
        # Damaged numbers may be large, or NaN; as zeros they fail the check sum.
        received = tuple([int(n) if n < 256 else 0 for n in numbers])
        self.received_stamps = received
        # The usual step: all ranks have sent what this one has. One comparison, because every step makes it.
        if received == self.own_stamp * (len(received) // STAMP_SIZE):
            return
        stamps = [StepStamp(*received[i : i + STAMP_SIZE]) for i in range(0, len(received), STAMP_SIZE)]
        number_of = self.program.communicator.backend.number_of
        why, differ = explain_difference(stamps, context, number_of)
        self.hyperparameters_differ = differ and not context.partial
        if why and not self.hyperparameters_differ:
            self.out_of_step = context.out_of_step or f"rank {number_of(context.rank)}: {why}"

    # -- statuses --------------------------------------------------------------------------------------

    def evaluate(self, ranks: Sequence[Sequence[float]], first: int = 0) -> None:
        """Set from the ranks' statuses which variables are missing, overflowed or refused.

        Args:
            ranks: the statuses of each rank, or their sum.
            first: the rank of the first of them.
        """
        if all([rank == self.program.all_expected for rank in ranks]):
            return
        for number, rank in enumerate(ranks, first):
            for name, flag in zip(self.names, rank, strict=True):
                if self.refused is None and (math.isnan(flag) if self.sums else flag == REFUSED):
                    self.refused = number, name
        limit = math.inf if self.sums else OVERFLOW
        self.missing = [all(flag == MISSING for flag in flags) for flags in zip(*ranks, strict=True)]
        now = [not all(flag < limit for flag in flags) for flags in zip(*ranks, strict=True)]
        self.overflowed = [a or b for a, b in zip(self.overflowed, now, strict=True)]

    def add_poison(self, flags: Sequence[Tensor], finite: Sequence[Tensor] = ()) -> None:
        """Add NaN to the poison of variables that overflowed, on the device.

        Args:
            flags: statuses of wires; an overflow gives Inf times -0, or -0 divided by 0, which is NaN.
            finite: 1.0 for each variable whose sum is finite, else 0.0.
        """
        k = self.kernels
        terms: list[Tensor] = [] if self.poison is None else [self.poison]
        for flag in flags:
            number = k.cast(flag, "float32")
            terms.append(number * -0.0 if self.sums else -0.0 / (OVERFLOW - number))
        if len(finite):
            terms.append(-0.0 / k.full(list(finite), "float32", flags[0]))
        self.poison = sum(terms[1:], start=terms[0])

    # -- reading, now or later -------------------------------------------------------------------------

    def read(
        self,
        tensors: Sequence[Flag],
        then: Callable[[list[list[float]]], object],
        expected: Sequence[float | None] = (),
    ) -> None:
        """Call ``then`` with the numbers in tensors (or bools): at once, or on a device when :func:`resolve_headers`
        reads them.

        Args:
            expected: see :class:`DeferredRead`.
        """
        if not self.on_device:
            then([self.kernels.to_list(one) if getattr(one, "shape", ()) else [float(one)] for one in tensors])
        elif tensors:
            self.deferred_reads = [*self.deferred_reads, DeferredRead(list(tensors), then, expected)]


# -- step stamps -----------------------------------------------------------------------------------------------------


def digest(settings: object) -> int:
    """Return a number of 32 bits for settings, the same in every process.

    >>> digest((0.1, 0.9)) == digest((0.1, 0.9)), digest((0.1, 0.9)) == digest((0.01, 0.9))
    (True, False)
    """
    return zlib.crc32(repr(settings).encode())


def step_stamp(context: AnyContext) -> StepStamp:
    """Return the stamp that this rank writes in its wires."""
    if context.out_of_step:
        return APART
    # Two digests may be equal modulo CYCLE. Mixed with the step, which ranks compare first, they are so in few steps.
    mixed = zlib.crc32(b"%d %d" % (context.step % CYCLE, context.hyperparameter_digest))
    numbers = [1 + n % CYCLE for n in (context.step, context.updates, context.cleared, mixed)]
    return StepStamp._make([*numbers, _check_sum(*numbers)])


def _check_sum(*numbers: int) -> int:
    # Unequal factors: numbers in each other's places show as well.
    return 1 + sum([factor * number for factor, number in enumerate(numbers, 1)]) % CYCLE


def explain_difference(
    stamps: Sequence[StepStamp], context: AnyContext, number_of: Callable[[int], int] = int
) -> tuple[str, bool]:
    """Return the reason why the ranks are out of step, and True if only their hyperparameters differ; ("", False) if
    the stamps are equal.

    Args:
        stamps: the stamps of all ranks.
        context: this rank's context.
        number_of: returns a rank's number in the run, for messages.

    >>> here = Context(step=6, rank=0, size=3)
    >>> behind = step_stamp(Context(step=5, updates=-1))
    >>> explain_difference([step_stamp(here), behind, step_stamp(here)], here)[0].partition(". ")[0]
    'rank 1 is at step 5, ranks 0 and 2 are at step 6: rank 1 left out optimizer.step()'
    >>> stepped = step_stamp(Context(step=6, updates=1))
    >>> explain_difference([step_stamp(here), step_stamp(here), stepped], here)[0].partition(": ")[2].partition(". ")[0]
    'ranks 0 and 1 left out optimizer.step(), or rank 2 called it without a backward pass'
    """
    mine = step_stamp(context)
    # Damaged stamps say nothing: decoding their payloads raises an error.
    leaders_apart = [rank for rank, theirs in enumerate(stamps) if context.partial and theirs == APART]
    intact = {rank: theirs for rank, theirs in enumerate(stamps) if rank in leaders_apart or not theirs.damaged}
    if all(theirs == mine for theirs in intact.values()):
        return "", False

    def call(ranks: Sequence[int]) -> str:
        return describe_ranks(list(map(number_of, ranks)), len(stamps) == context.size)

    if leaders_apart:
        why = f"ranks that exchange through {call(leaders_apart)} went different ways; their own errors say how"
        return why, False
    why = _explain_missing_step(intact, mine, context, call) or _explain_missing_backward(intact, mine, context, call)
    if why:
        return f"{why}. {ADVICE}", False
    # Steps are equal, so digests differ: nothing else is in a stamp.
    return f"the optimizer's hyperparameters differ at step {context.step}", True


def _explain_missing_step(stamps: dict[int, StepStamp], mine: StepStamp, context: AnyContext, call: Call) -> str:
    """Return which ranks left out ``optimizer.step()``, or whole steps; empty if all made the same.

    A rank that left out ``step()`` is behind in updates; one that left out a whole step is behind in both counts.
    """
    steps_ahead = {rank: _signed(theirs.step - mine.step) for rank, theirs in stamps.items()}
    updates_ahead = {rank: _signed(theirs.updates - mine.updates) for rank, theirs in stamps.items()}
    most_steps, most_updates = max(steps_ahead.values()), max(updates_ahead.values())
    behind = {rank: max(most_steps - steps_ahead[rank], most_updates - updates_ahead[rank]) for rank in stamps}
    late = [rank for rank, steps in behind.items() if steps]
    if not late:
        return ""
    where = _describe_steps({rank: context.step + most_steps - steps for rank, steps in behind.items()}, call)
    why = f"{where}: {call(late)} left out {context.api_names.step}"
    if len(set(steps_ahead.values())) > 1:
        return why
    # All ranks have made equally many exchanges, so that a step without a backward pass looks the same.
    return f"{why}, or {call([rank for rank in stamps if rank not in late])} called it without a backward pass"


def _explain_missing_backward(stamps: dict[int, StepStamp], mine: StepStamp, context: AnyContext, call: Call) -> str:
    """Return which ranks of equal steps cleared gradients more often than others; empty if none did.

    Such a rank has left ``backward()`` out, or has cleared once more, which looks the same from here.
    """
    ahead = {rank: _signed(theirs.cleared - mine.cleared) for rank, theirs in stamps.items()}
    least = min(ahead.values())
    early = [rank for rank, cleared in ahead.items() if cleared > least]
    if not early:
        return ""
    where = _describe_steps({rank: context.step + cleared - least for rank, cleared in ahead.items()}, call)
    why = "left out backward(), or cleared once more than the others: clear on all ranks alike"
    return f"{where}: {call(early)} called optimizer.zero_grad() and {why}"


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


def _describe_steps(steps: dict[int, int], call: Call) -> str:
    """Return a description of the ranks at each step, the lowest step first."""
    at = [(step, [rank for rank in steps if steps[rank] == step]) for step in sorted(set(steps.values()))]
    return ", ".join(f"{call(ranks)} {'is' if len(ranks) == 1 else 'are'} at step {step}" for step, ranks in at)


def _signed(n: int) -> int:
    """Return the difference of numbers that start again after CYCLE, the nearest to 0."""
    return (n + CYCLE // 2) % CYCLE - CYCLE // 2
