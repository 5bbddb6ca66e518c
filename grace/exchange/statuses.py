"""What an exchange learns from the statuses and places that come with the payloads."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.errors import PayloadError
from grace.exchange.bucket import Outcome
from grace.exchange.places import NUMBERS, compare, place
from grace.exchange.wire import OVERFLOW, PRESENT


class Judging:
    """A part of :class:`grace.exchange.base.Exchange`.

    Ranks that are at different steps go on with this step's collectives, and give up together at its end: who runs
    the step looks at ``astray`` and ``unlike`` when all of its exchanges are done.
    """

    communicator: Any
    bucket: Any
    guard: bool
    handle: Any
    kernels: Any
    layouts: list[Any]
    names: list[str]
    present: list[bool]
    spoilt: list[bool]
    traits: Any
    wire: Any
    _wires: Any
    refusal: PayloadError | None
    astray: str = ""
    """Why the ranks cannot go on together; empty if they can."""
    unlike: bool = False
    """Whether they could, but their optimizers' hyperparameters differ: then all of them ask which."""
    lazy: bool = False
    """Whether somebody calls :meth:`look_again` at the end of the step: places on a device can wait until then."""
    unread: Sequence[Tensor] = ()
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

    def look(self, layouts: Sequence[Any], wires: Sequence[Tensor], wait: bool = True) -> bool:
        """Compare the places in these wires; whether the ranks cannot go on together.

        Args:
            wait: False to put it off if they would have to be read from a device, and somebody looks again.
        """
        if not self.bucket.carries or self.astray or self.unlike:
            return bool(self.astray)
        told = [layout.told(buffer) for layout, buffer in zip(layouts, wires, strict=True)]
        if not wait and self.lazy and getattr(getattr(told[0], "device", None), "type", "cpu") != "cpu":
            self.unread = told
            return False
        return self._compare([self.kernels.to_list(part) for part in told])

    def look_again(self) -> None:
        """Compare the places that were left on a device."""
        unread, self.unread = self.unread, []
        if unread:
            numbers, count = self.kernels.to_list(self.kernels.join(unread)), unread[0].shape[0]
            self._compare([numbers[i : i + count] for i in range(0, len(numbers), count)])

    def glance(self) -> None:
        """Compare the places that came; nothing else that came counts."""
        if self.refusal:  # none came
            return
        with contextlib.suppress(PayloadError):
            wires = self._wires()  # which knows the layouts only once they came
            self.look(self.layouts, wires)

    def _compare(self, told: list[list[float]]) -> bool:
        """Whether the ranks cannot go on together, by the numbers in their wires."""
        numbers = told[0]
        if len(told) > 1:
            each = zip(*told, strict=True)
            numbers = [sum(all_of_one) for all_of_one in each] if self.everyone else [n for one in told for n in one]
        self.told, context = [int(n) if n < 256 else 0 for n in numbers], self.communicator.context
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
        missing = [False] * len(self.names)
        if not all(self.present) or not self.traits.carries_nonfinite:
            statuses = self.wire.statuses(total)
            missing = [status == 0 for status in statuses]
            self.spoilt = [was or not status < math.inf for was, status in zip(self.spoilt, statuses, strict=True)]
        if not self._finite([total[: self.wire.body]]):
            for i, payload in enumerate(self.wire.unpack(total)):
                self.spoilt[i] = self.spoilt[i] or not self._finite(payload)
        return missing, self.spoilt

    def _statuses_of(self, wires: list[Tensor]) -> tuple[list[bool], list[bool]]:
        """Per variable: whether no rank had a gradient, and whether one overflowed."""
        count = len(self.names)
        missing = overflow = [False] * count
        told = not all(self.present) or not self.traits.carries_nonfinite
        self.look(self.layouts, wires, wait=told or self.guard)
        if told:
            ranks = [layout.statuses(buffer) for layout, buffer in zip(self.layouts, wires, strict=True)]
            limit = math.inf if self.communicator.sums else OVERFLOW
            well = self.communicator.context.size if self.communicator.sums else PRESENT
            if any(rank.count(well) < count for rank in ranks):
                missing = [all(rank[i] == 0 for rank in ranks) for i in range(count)]
                overflow = [any(not rank[i] < limit for rank in ranks) for i in range(count)]
        sums = self.communicator.sums  # of finite numbers may be infinite
        visible = self.guard and (sums or self.traits.carries_nonfinite)
        if visible and not (sums and self._finite([wires[0][: self.wire.body]])):
            received = [layout.unpack(buffer) for layout, buffer in zip(self.layouts, wires, strict=True)]
            overflow = [was or not all(self._finite(rank[i]) for rank in received) for i, was in enumerate(overflow)]
        return missing, overflow

    def _finite(self, tensors: Sequence[Tensor]) -> bool:
        return all(bool(self.kernels.all_finite(tensor)) for tensor in tensors)
