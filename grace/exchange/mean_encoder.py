"""The means of a round trip that are encoded once more, by the owners of pieces or by a root, for all other ranks.

An owner, or the root, decodes and averages all ranks' payloads, and compresses the mean. The other ranks wait for it
whatever happens, so it always sends a wire: if it could not decode a payload, or a rank has withheld one, the wire has
no payloads, and a status that says :data:`~grace.exchange.header.REFUSED`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.errors import PayloadError
from grace.exchange.header import MISSING, OVERFLOW, PRESENT, REFUSED, Flag, Header, logical_and, status
from grace.exchange.layout import Layout, Status
from grace.exchange.payload_errors import PayloadErrors
from grace.exchange.tracing import recorder


class MeanEncoder:
    """Encoder of the means that this rank sends in one round trip, and reader of the statuses that come with means.

    1. ``encode`` compares step stamps, reads all ranks' statuses, decodes and averages payloads, compresses the mean,
       and packs it with its statuses into a wire.
    2. ``evaluate`` reads the statuses of the means that arrive, on all ranks.

    Args:
        program: the bucket's :class:`~grace.exchange.round_trip.BucketProgram`.
        header: this rank's header; stamps and statuses are read into it.
        count: counts the wires of layouts, joined in a buffer, in the traffic.

    Attributes:
        layout: layout of this rank's means, or of the root's; None until it is known.
        refused: the variable whose payloads this rank could not decode while the others wait for its means.
        error: the error of that variable.
    """

    layout: Layout | None = None
    refused: str | None = None
    error: PayloadError | None = None

    def __init__(self, program: Any, header: Header, count: Callable[[Sequence[Layout], Tensor], None]):
        self.program = program
        self.bucket = program.bucket
        self.codec = program.codec
        self.communicator = program.communicator
        self.kernels = program.kernels
        self.names = program.bucket.names
        self.on_device = program.on_device
        self.header = header
        self.count = count

    @property
    def errors(self) -> PayloadErrors:
        """The builder of errors, for this step."""
        return PayloadErrors(self.program)

    # -- sending ---------------------------------------------------------------------------------------

    def encode(self, wires: Sequence[Tensor], layouts: Sequence[Layout]) -> Tensor | None:
        """Return the wire of the means that this rank owns; None, on all owners, if the ranks are out of step.

        Args:
            wires: the wires of all ranks.
            layouts: their layouts.
        """
        header, rooted = self.header, self.communicator.rooted
        with recorder.phase("unpack", bucket=self.bucket):
            self.layout = self.codec.means_layouts()[self.codec.owner]
            out_of_step = header.compare_stamps(layouts, wires)
            if out_of_step and not self.on_device:
                # The other ranks wait for a root's answer. Owners have all compared the stamps themselves.
                return self._without_payloads([MISSING] * len(self.names), wires[0]) if rooted else None
            flags = [wire[layout.statuses] for layout, wire in zip(layouts, wires, strict=True)]
            self._read_statuses(flags)
        if self.refused is not None:
            return self._refusing_wire(wires[0])
        try:
            finite = self.codec.average(wires, layouts, header)
        except PayloadError as error:  # the other ranks wait for the means: send statuses that say refused
            self.refused = error.variable
            self.error = self.errors.withheld() or self.errors.undecoded(error, error.variable)
            return self._refusing_wire(wires[0])
        statuses, kept = self._statuses(finite, flags)
        stamps = header.received_stamps if rooted else header.stamps_to_send
        with recorder.phase("pack", bucket=self.bucket):
            buffer, self.layout = self.codec.write_means(statuses, stamps if self.bucket.carries_stamps else ())
        if self.program.size > 1 or not rooted:
            self.count([self.layout], buffer)
        self.codec.update_mean_memory(kept)
        return buffer

    def sizes(self) -> list[int]:
        """Return the sizes of the payload tensors of the means that were encoded.

        No sizes are negative: a negative number says which variable was refused."""
        assert self.layout is not None
        if self.refused is not None:
            return [-1 - self.names.index(self.refused)] * len(self.codec.layouts[0].shapes)
        return self.layout.sizes()

    def _read_statuses(self, flags: Sequence[Tensor]) -> None:
        """Read from all ranks' statuses which variables are missing, overflowed or withheld; defer that on a device."""
        header = self.header
        if self.on_device:
            if self.communicator.piecewise:
                header.read(flags, self._read_missing)
            return
        header.evaluate([self.kernels.to_list(flag) for flag in flags])
        if header.refused is not None:
            rank, self.refused = header.refused
            self.error = self.errors.withheld_by(rank, self.refused)

    def _read_missing(self, ranks: list[list[float]]) -> None:
        self.header.missing = [not any(flags) for flags in zip(*ranks, strict=True)]

    def _statuses(self, finite: Sequence[Flag], flags: Sequence[Tensor]) -> tuple[list[Status], list[bool]]:
        """Return the statuses of means, and True for each variable that the memory of means is updated with.

        Args:
            finite: True for each variable whose mean is in range.
            flags: the statuses of all ranks.
        """
        count = len(self.names)
        # On a device all memories are updated now, and rolled back when headers are read. Memories of owners are
        # committed, or rolled back, with the step.
        if self.codec.wrote_statuses:  # kernels have written the statuses on the device
            return [], [True] * count
        if self.on_device:
            return self._statuses_on_device(finite, flags), [True] * count
        piecewise = self.communicator.piecewise
        # Each owner has a piece of every variable, and so knows itself which are missing.
        here = [piecewise or not missing for missing in self.header.missing]
        each = zip(self.header.overflowed, finite, strict=True)
        well = [bool(logical_and(not overflowed, ok)) for overflowed, ok in each]
        statuses = [status(present, ok, False) for present, ok in zip(here, well, strict=True)]
        return statuses, [piecewise or (present and ok) for present, ok in zip(here, well, strict=True)]

    def _statuses_on_device(self, finite: Sequence[Flag], flags: Sequence[Tensor]) -> list[Status]:
        """Return the statuses of means, computed on the device from those of all ranks; a root reads them later."""
        k, piecewise, count = self.kernels, self.communicator.piecewise, len(self.names)
        numbers = [k.cast(flag, "float32") for flag in flags]
        here: list[Flag] = [True] * count if piecewise else list(k.cast(sum(numbers) > 0, "float32"))
        overflows = sum(number * (number - PRESENT) for number in numbers)  # 0 for statuses of 0 and 1 alone
        none_overflowed: list[Flag] = list(k.cast(overflows == 0, "float32"))
        well = [logical_and(a, b) for a, b in zip(none_overflowed, finite, strict=True)]
        statuses = [present * status(True, ok, False) for present, ok in zip(here, well, strict=True)]
        if piecewise:
            return statuses
        if self.communicator.user_defined:  # turn an overflow into a refusal if a rank sent no payload
            withheld = sum(k.cast(number > OVERFLOW, "float32") for number in numbers)
            statuses = [one + k.cast(more > 0, "float32") for one, more in zip(statuses, withheld, strict=True)]
        self.header.read([k.full(statuses, "float32", flags[0])], self._roll_back_means)
        return statuses

    def _roll_back_means(self, statuses: list[list[float]]) -> None:
        for name, number in zip(self.names, statuses[0], strict=True):
            if number != PRESENT:
                self.codec.roll_back_mean(name)

    def _refusing_wire(self, like: Tensor) -> Tensor:
        """Return a wire of means without payloads, whose status refuses one variable."""
        return self._without_payloads([REFUSED if name == self.refused else MISSING for name in self.names], like)

    def _without_payloads(self, statuses: Sequence[int], like: Tensor) -> Tensor:
        """Return a wire of means whose payloads are zeros."""
        layouts = self.codec.means_layouts()
        layout = layouts[self.codec.owner]
        stamps = self.header.received_stamps if self.communicator.rooted else self.header.stamps_to_send
        stamps = list(stamps) or [0] * self.codec.stamps
        return self.codec.padded(layout.pack(layout.zeros(like), statuses, stamps), layouts)

    # -- receiving -------------------------------------------------------------------------------------

    def evaluate(self, ranks: list[list[float]], first: int) -> None:
        """Evaluate the statuses that the owners, or the root, sent with their means.

        Args:
            ranks: the statuses of each.
            first: the rank of the first of them.

        Raises:
            PayloadError: one of them could not decode a payload, or this rank has withheld one.
        """
        header, missing = self.header, self.header.missing
        for rank, statuses in enumerate(ranks, first):
            if REFUSED in statuses:
                raise self.not_sent(rank, self.names[list(statuses).index(REFUSED)])
        header.evaluate(ranks, first)
        header.missing = [a or b for a, b in zip(missing, header.missing, strict=True)]

    def not_sent(self, rank: int, name: str) -> PayloadError:
        """Return the error of means that an owner, or the root, did not send: its own, if that is this rank."""
        return self.error or self.errors.no_means(rank, name)
