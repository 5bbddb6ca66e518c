"""Errors of payloads that a rank cannot decode, or did not send; the messages name the rank, the variable and the
method."""

from typing import Any

from grace.errors import PayloadError

VARIES = (
    "Where that depends on the data the compressor must say so: traits = Traits(..., fixed_size='by data'), or "
    "tensors_size_are_same=False"
)


class PayloadErrors:
    """Builder of the errors of one bucket's payloads at the current step.

    Args:
        program: the bucket's :class:`~grace.exchange.round_trip.BucketProgram`.
    """

    def __init__(self, program: Any):
        self.backend = program.communicator.backend
        self.codec = program.codec
        self.names = program.bucket.names
        self.method = program.communicator.compressor.spec
        self.step = program.context.step
        self.sums = program.sums

    def undecoded(self, error: PayloadError, name: str) -> PayloadError:
        """Return the error of a payload that cannot be decoded."""
        sender = "another rank" if error.place is None else self.rank(error.place)
        return self._error(
            f"what {sender} sent of {name!r} at step {self.step} is no payload of {self.method}: {error}. It was "
            "damaged on its way, or that rank runs other code"
        )

    def withheld(self) -> PayloadError | None:
        """Return the error of this rank's payload if it has other shapes or dtypes than before; else None."""
        if self.codec.withheld is None:
            return None
        i, of, now, was = self.codec.withheld
        return self._error(
            f"{self.method}: the payload of {self.names[i]!r} has the {of} {now} at step {self.step}, and had {was} at "
            f"the first. {VARIES}"
        )

    def withheld_by(self, rank: int, name: str) -> PayloadError:
        """Return the error of a payload that a rank did not send."""
        who = "another rank" if self.sums else self.rank(rank)
        return self.withheld() or self._error(
            f"{who} has not sent its payload of {name!r} at step {self.step}, which is laid out otherwise than at the "
            "first; its own error says more"
        )

    def no_means(self, rank: int, name: str) -> PayloadError:
        """Return the error of a rank whose owner, or root, could not decode a payload."""
        return self.withheld() or self._error(
            f"{self.rank(rank)} could not decode what it was sent of {name!r} at step {self.step}; its own error says "
            "more"
        )

    def sizes_differ(self, name: str, sizes: str, rank: int) -> PayloadError:
        """Return the error, equal on all ranks, of a payload that has other sizes on a rank than on rank 0."""
        return PayloadError(f"{self.method}: the payload of {name!r} has {sizes} on {self.rank(rank)}. {VARIES}")

    def rank(self, rank: int) -> str:
        """Return the name of one of the ranks of this exchange, by its number in the run."""
        return f"rank {self.backend.number_of(rank)}"

    def _error(self, text: str) -> PayloadError:
        return PayloadError(f"{self.backend.rank_label}: {text}")
