"""What an exchange learns from the statuses and places that come with the payloads."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.errors import PayloadError
from grace.exchange.bucket import Outcome
from grace.exchange.places import NUMBERS, compare, place
from grace.exchange.wire import OVERFLOW, PRESENT
from grace.kernels import kernels_of

Question = tuple[list[Tensor], Callable[[list[list[float]]], Any], Sequence[float | None]]
"""Small tensors, what is to be done once their numbers are known, and what each holds if all is well: a status of every
variable, or None of a flag, which is 1. Nothing of those that are no matter of that."""


def learn(exchanges: Sequence[Any]) -> None:
    """Read what exchanges have left on a device, all of it at once; they then know what on a CPU they know before they
    decode.

    Raises:
        PayloadError: a rank could not decode what it was sent.
    """
    questions: list[Question] = []
    for exchange in exchanges:
        questions += exchange.questions
        exchange.questions = []
    if questions:
        tensors = [tensor for tensors, *_ in questions for tensor in tensors]
        numbers = kernels_of(tensors[0]).read(tensors)
        for tensors, then, _ in questions:
            then(numbers[: len(tensors)])
            del numbers[: len(tensors)]


class Judging:
    """A part of :class:`grace.exchange.base.Exchange`.

    Ranks that are at different steps go on with this step's collectives, and give up together at its end: who runs
    the step looks at ``astray`` and ``unlike`` when all of its exchanges are done.

    On a device statuses and places stay where they are: exchanges go on as if all were well, and somebody learns at the
    end of the step, once for all of them, what is to become of it.
    """

    communicator: Any
    bucket: Any
    codec: Any
    guard: bool
    handle: Any
    kernels: Any
    layouts: list[Any]
    names: list[str]
    present: list[bool]
    spoilt: list[bool]
    check_withheld: Callable[[Sequence[Sequence[float]]], None]
    traits: Any
    wire: Any
    _wires: Any
    refusal: PayloadError | None
    astray: str = ""
    """Why the ranks cannot go on together; empty if they can."""
    unlike: bool = False
    """Whether they could, but their optimizers' hyperparameters differ: then all of them ask which."""
    puts_off: ClassVar[bool] = True
    """Whether it can be finished before statuses are read."""
    far: bool = False
    """Whether what comes lies on a device, and is put off."""
    lazy: bool = False
    """Whether somebody calls :func:`learn` at the end of the step; else :meth:`finish` does."""
    late: bool = False
    """Whether somebody learns only when the means were used: then those that overflowed become NaN on the device."""
    spoiling: Any = None
    """By variable what a mean is spoilt with there: NaN, or -0, which changes no number."""
    questions: Sequence[Question] = ()
    """What nobody has learnt yet."""
    outcomes: Sequence[Outcome] = ()
    """What :meth:`finish` returned."""
    told: Sequence[int] = ()
    """All ranks' places, as they came."""

    # -- places ----------------------------------------------------------------------------------------

    @property
    def everyone(self) -> bool:
        """Whether a wire has room for all ranks' places, each of which fills in its own."""
        return self.communicator.sums

    @property
    def room(self) -> int:
        """Numbers in a wire that are places."""
        return NUMBERS * (self.communicator.context.size if self.everyone else 1) if self.bucket.carries else 0

    def own_place(self) -> list[int]:
        """This rank's place, as it stands in that room."""
        if not self.bucket.carries:
            return []
        context = self.communicator.context
        if not self.everyone:
            return place(context)
        return [*[0] * NUMBERS * context.rank, *place(context), *[0] * NUMBERS * (context.size - 1 - context.rank)]

    def look(self, layouts: Sequence[Any], wires: Sequence[Tensor]) -> bool:
        """Compare the places in these wires; whether the ranks are known not to be able to go on together."""
        if not self.bucket.carries or self.astray or self.unlike:
            return bool(self.astray)
        told = [layout.told(buffer) for layout, buffer in zip(layouts, wires, strict=True)]
        here = self.communicator.context
        if self.far:
            then = dataclasses.replace(here) if isinstance(here, Context) else here  # which goes on meanwhile
            self.ask(told, lambda numbers: self._compare(numbers, then))
            return False
        return self._compare([self.kernels.to_list(part) for part in told], here)

    def ask(
        self,
        tensors: list[Tensor],
        then: Callable[[list[list[float]]], Any],
        well: Sequence[float | None] = (),
    ) -> None:
        """Have ``then`` called with the numbers in these tensors, when they are read."""
        self.questions = [*self.questions, (tensors, then, well)]

    def glance(self) -> None:
        """Compare the places that came; nothing else that came counts."""
        if self.refusal:  # none came
            return
        with contextlib.suppress(PayloadError):
            wires = self._wires()  # which knows the layouts only once they came
            self.look(self.layouts, wires)

    def _compare(self, told: list[list[float]], context: Any) -> bool:
        """Whether the ranks cannot go on together, by the numbers in their wires, and where this rank was."""
        numbers = told[0]
        if len(told) > 1:
            each = zip(*told, strict=True)
            numbers = [sum(all_of_one) for all_of_one in each] if self.everyone else [n for one in told for n in one]
        self.told = [int(n) if n < 256 else 0 for n in numbers]
        places = [self.told[i : i + NUMBERS] for i in range(0, len(self.told), NUMBERS)]
        why, unlike = compare(places, context)
        self.unlike = unlike and not context.names  # else not all ranks are here
        if why and not self.unlike:
            name = context.names[context.rank] if context.names else context.rank
            self.astray = context.astray or f"rank {name}: {why}"
        return bool(self.astray)

    def nothing(self) -> list[Outcome]:
        """What an exchange of ranks that are not at one step brings."""
        return [Outcome(variable, None, False) for variable in self.bucket.variables]

    # -- statuses --------------------------------------------------------------------------------------

    def _statuses_of_round(self) -> tuple[list[bool], list[bool]]:
        """Of a method of several rounds: whether no rank had a gradient, and whether one overflowed in this round or
        an earlier one, which later rounds may not show (an infinite column becomes a finite one again)."""
        (total,) = self.handle.result()
        self.look([self.wire], [total])
        told, body, missing = self._asks_statuses, total[: self.wire.body], [False] * len(self.names)
        finite = None if self.codec is None else self.codec.receive(total, self._count_of_sum)
        wire = self.wire  # the next round's is another one

        def judge(statuses: list[float], finite: bool) -> list[bool]:
            self.spoilt = [was or not status < math.inf for was, status in zip(self.spoilt, statuses, strict=True)]
            if not finite:
                for i, payload in enumerate(wire.unpack(total)):
                    self.spoilt[i] = self.spoilt[i] or not self._finite(payload)
            return [status == 0 for status in statuses]

        def then(numbers: list[list[float]]) -> None:
            found = judge(numbers[1] if told else [1.0] * len(self.names), min(numbers[0]) == 1.0)
            self._amend(found, self.spoilt)

        if self.far:
            flags = self.kernels.all_finite(body) if finite is None else finite
            self.ask([flags, *([wire.marked(total)] if told else [])], then, [None, self._well])
            if self.late:
                if finite is None:
                    finite = [math.prod(map(self.kernels.all_finite, payload)) for payload in wire.unpack(total)]
                self._spoil([wire.marked(total)], finite)
            return missing, [False] * len(self.names)
        return judge(wire.statuses(total) if told else [1.0] * len(self.names), self._finite([body])), self.spoilt

    @property
    def _asks_statuses(self) -> bool:
        """Whether statuses say more than payloads."""
        return not all(self.present) or not self.traits.carries_nonfinite or self.communicator.foreign

    def _statuses_of(self, wires: list[Tensor]) -> tuple[list[bool], list[bool]]:
        """Per variable: whether no rank had a gradient, and whether one overflowed; on a device, that all is well."""
        count = len(self.names)
        missing = overflow = [False] * count
        sums = self.communicator.sums  # of finite numbers may be infinite
        visible = self.guard and (sums or self.traits.carries_nonfinite)
        self.look(self.layouts, wires)
        if self.far:
            self._ask_statuses(wires, visible)
            return missing, overflow
        if self._asks_statuses:
            ranks = [layout.statuses(buffer) for layout, buffer in zip(self.layouts, wires, strict=True)]
            missing, overflow = self._judged(ranks)
        if visible and not (sums and self._finite([wires[0][: self.wire.body]])):
            overflow = self._shown(wires, overflow)
        return missing, overflow

    @property
    def _count_of_sum(self) -> float:
        """What a sum of payloads is divided by, to be their mean."""
        size: float = self.communicator.context.size / self.communicator.context.predivide
        return size

    @property
    def _well(self) -> float:
        """A status, of one rank or their sum, where all ranks have a gradient in range."""
        return self.communicator.context.size if self.communicator.sums else PRESENT

    def _judged(self, ranks: Sequence[list[float]]) -> tuple[list[bool], list[bool]]:
        """What all ranks' statuses, or their sum, say of each variable."""
        count, sums = len(self.names), self.communicator.sums
        limit, well = math.inf if sums else OVERFLOW, self._well
        if all(rank.count(well) == count for rank in ranks):
            return [False] * count, [False] * count
        self.check_withheld(ranks)
        missing = [all(rank[i] == 0 for rank in ranks) for i in range(count)]
        return missing, [any(not rank[i] < limit for rank in ranks) for i in range(count)]

    def _shown(self, wires: Sequence[Tensor], overflow: list[bool]) -> list[bool]:
        """Per variable whether it overflowed, as statuses or payloads say."""
        received = [layout.unpack(buffer) for layout, buffer in zip(self.layouts, wires, strict=True)]
        return [was or not all(self._finite(rank[i]) for rank in received) for i, was in enumerate(overflow)]

    def _ask_statuses(self, wires: list[Tensor], visible: bool) -> None:
        """Amend the outcomes by what the wires' statuses and payloads say, once they are read."""
        k, count, sums = self.kernels, len(self.names), self.communicator.sums
        marks = [layout.marked(w) for layout, w in zip(self.layouts, wires, strict=True)] if self._asks_statuses else []
        if not visible:
            bodies = []
        elif sums:  # variable by variable only if something is found
            bodies = [wires[0][: self.wire.body]]
        else:
            payloads = [layout.unpack(w) for layout, w in zip(self.layouts, wires, strict=True)]
            bodies = [t for i in range(count) for rank in payloads for t in rank[i]]

        def then(numbers: list[list[float]]) -> None:
            missing, overflow = self._judged(numbers[: len(marks)]) if marks else ([False] * count, [False] * count)
            if any(flag != [1.0] for flag in numbers[len(marks) :]):
                overflow = self._shown(wires, overflow)
            self._amend(missing, overflow)

        if marks or bodies:
            wanted = [*[self._well] * len(marks), *[None] * len(bodies)]
            self.ask([*marks, *(k.all_finite(part) for part in bodies)], then, wanted)
        if self.late and self.hides_overflow:
            self._spoil(marks)

    def _amend(self, missing: Sequence[bool], overflow: Sequence[bool]) -> None:
        """Let the outcomes say which variables nobody had a gradient for, and which overflowed."""
        for i, outcome in enumerate(self.outcomes if any(missing) or any(overflow) else ()):
            outcome.overflow = outcome.overflow or overflow[i]
            if overflow[i] and outcome.value is not None and self.hides_overflow and not (self.late and self.far):
                outcome.value = self._poisoned(outcome.value)
            if missing[i]:
                outcome.value = None

    @property
    def hides_overflow(self) -> Any:
        """Whether what comes of infinite numbers may be finite."""
        return self.traits.rounds > 1 or not self.traits.carries_nonfinite

    def _spoil(self, marks: Sequence[Tensor], finite: Sequence[Tensor] = ()) -> None:
        """Spoil the means of the variables of which statuses, or flags of what is finite, say that they overflowed."""
        k = self.kernels
        for mark in marks:
            told = k.cast(mark, "float32")
            found = told * -0.0 if self.communicator.sums else -0.0 / (OVERFLOW - told)
            self.spoiling = found if self.spoiling is None else self.spoiling + found
        if len(finite):
            self.spoiling = self.spoiling + -0.0 / k.full(list(finite), "float32", marks[0])

    def _spoilt_at_once(self) -> None:
        """Let the means be NaN that are to be."""
        for i, outcome in enumerate(self.outcomes if self.spoiling is not None else ()):
            outcome.value = self.kernels.add(outcome.value, self.spoiling[i])

    def _poisoned(self, value: Any) -> Any:
        """A rank's gradient was not finite, so that the mean is not."""
        return self.kernels.add(value, value, math.nan)

    def spoilt_by(self, marks: Sequence[Tensor]) -> Tensor:
        """0 for each variable that no rank's bytes say to have overflowed, and more for others; on the device."""
        statuses = [self.kernels.cast(mark, "float32") for mark in marks]
        return sum(told * (told - PRESENT) for told in statuses)

    def _finite(self, tensors: Sequence[Tensor]) -> bool:
        return all(bool(self.kernels.all_finite(tensor)) for tensor in tensors)
