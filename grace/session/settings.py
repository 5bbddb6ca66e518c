"""Settings of the exchange that do not depend on the method, with their checks, for all frameworks."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

from grace.core.communicator import Communicator
from grace.errors import ConfigError
from grace.session.bucket_limits import Limits


@dataclass
class ReduceOp:
    """Reduction over ranks. It does not change the computation of a method.

    Compressors and memories get every rank's gradient unchanged, whatever the reduction, so that thresholds and
    clipping norms are in the units of the gradient of one step (the sum over ``backward_passes_per_step`` in torch, the
    mean over Keras's ``gradient_accumulation_steps``).

    Args:
        op: "average" or "sum", or Horovod's constants of these names. A sum is the aggregate times the number of ranks;
            a vote (signsgd, signum) is a direction and no mean, and is not multiplied.
        predivide: divisor of payloads that an engine sums (Allreduce, and ReduceBroadcast of summable payloads); their
            sum is divided by ranks / predivide. This keeps a sum of 16-bit numbers in range. Payloads that are gathered
            are added in float32, and not divided.
    """

    op: str | int = "average"
    predivide: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.op, str):
            self.op = self.op.lower()
            return
        # Horovod's constants are numbers. If it was never imported, none of them can have been given.
        for module in ("horovod.torch", "horovod.tensorflow"):
            horovod = sys.modules.get(module)
            if horovod is not None:
                constants = {horovod.Average: "average", horovod.Sum: "sum", horovod.Adasum: "adasum"}
                self.op = constants.get(self.op, self.op)
                return

    def check(self) -> None:
        """Raise ConfigError if the settings cannot work."""
        if self.op == "adasum":
            raise ConfigError("op=Adasum combines whole gradients, not compressed ones; use op='average' or 'sum'")
        if self.op not in ("average", "sum"):
            raise ConfigError(f"op must be 'average' or 'sum', not {self.op!r}")
        if not isinstance(self.predivide, (int, float)) or not 0 < self.predivide < float("inf"):
            raise ConfigError(f"gradient_predivide_factor must be a positive number, not {self.predivide!r}")
        if self.predivide != 1 and self.op != "average":
            raise ConfigError("gradient_predivide_factor goes with op='average' only")

    def factor(self, votes: bool, size: int) -> float:
        """Return the factor of a method's aggregate on ``size`` ranks.

        >>> average, total = ReduceOp("average", 4.0), ReduceOp("sum")
        >>> average.factor(False, 2), total.factor(False, 2), total.factor(True, 2)
        (1.0, 2.0, 1.0)
        """
        return float(size) if self.op == "sum" and not votes else 1.0


def reduction(op: str | int | None, average: bool | None) -> str:
    """Return "average" or "sum" for the ``op`` and ``average`` that Horovod's allreduce takes.

    Raises:
        ConfigError: both are given, or the value is neither.

    >>> reduction(None, None), reduction("sum", None), reduction(None, False)
    ('average', 'sum', 'sum')
    """
    if op is not None and average is not None:
        raise ConfigError("op= and average= are two ways to say the same: give one of them")
    chosen = ReduceOp(("average" if average or average is None else "sum") if op is None else op)
    chosen.check()
    return str(chosen.op)


@dataclass(kw_only=True)
class Settings:
    """Settings of the user besides method and strategy, equal on every rank.

    They are arguments of DistributedOptimizer in torch and in Keras, whose files hold them. Settings of torch alone are
    not among them (docs/adding.md).

    Args:
        reduction: mean or sum.
        bucket_bytes: bytes on the wire per collective.
        group_bytes: bytes of gradient per collective. Without either, :class:`~grace.session.bucket_limits.Limits` has
            the rule.
        seed: seed of the random numbers of stochastic methods.
        sparse_as_dense: True to exchange sparse gradients as dense ones.
        broadcast: True to start from rank 0's values.
        hierarchical: True to reduce over the ranks of a node first.
        compress_after: number of first steps that are exchanged uncompressed.
    """

    reduction: ReduceOp = field(default_factory=ReduceOp)
    bucket_bytes: int | None = None
    group_bytes: int | None = None
    seed: int = 0
    sparse_as_dense: bool = False
    broadcast: bool = True
    hierarchical: bool = False
    compress_after: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, Integral):
            self.seed = int(self.seed)  # files hold no NumPy integers

    def check(self) -> None:
        """Raise ConfigError if a setting cannot work."""
        for name in ("bucket_bytes", "group_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name))
        self.reduction.check()
        check_integer("compress_after", self.compress_after, low=0)

    def check_auto(self) -> None:
        """Raise ConfigError for a setting that does not go with ``strategy="auto"``."""
        if self.compress_after:
            raise ConfigError(
                "compress_after does not go with strategy='auto', which begins uncompressed and tries methods at once"
            )

    def check_sums(self, communicators: Iterable[Communicator], in_rounds: bool) -> None:
        """Refuse op='sum' where there are no sums: in outer rounds, and with a method that votes after uncompressed
        steps, since votes are smaller by the number of ranks.

        Args:
            communicators: those of the run.
            in_rounds: True if ranks train alone between outer rounds.

        Raises:
            ConfigError: the ranks' drifts are averaged, or a communicator's method votes.
        """
        if self.reduction.op != "sum":
            return
        if in_rounds:
            raise ConfigError(
                "op='sum' does not go with outer=, whose rounds average how far ranks have drifted: use op='average'"
            )
        for communicator in communicators:
            if communicator.compress_after and communicator.compressor.votes:
                raise ConfigError(
                    f"op='sum' with compress_after={communicator.compress_after}: {communicator.compressor.spec} "
                    "votes, and a vote is as large as a mean, not as a sum: use op='average'"
                )

    @property
    def limits(self) -> Limits:
        """Limits of a bucket."""
        return Limits(self.bucket_bytes, self.group_bytes)

    def arguments(self) -> dict[str, Any]:
        """Return the settings as arguments of DistributedOptimizer.

        >>> list(Settings().arguments())[:2]
        ['op', 'gradient_predivide_factor']
        """
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "reduction"}
        return {"op": self.reduction.op, "gradient_predivide_factor": self.reduction.predivide, **others}

    def facts(self) -> list[tuple[str, str]]:
        """Return the facts that ranks compare. The seed is not among them: every runner compares it."""
        return [(name, str(value)) for name, value in self.arguments().items() if name != "seed"]


def checked_seed(seed: object) -> int:
    """Return a seed as Python's int, which checkpoints hold.

    Raises:
        ConfigError: it is no whole number.

    >>> import numpy as np
    >>> checked_seed(np.int64(3))
    3
    """
    if not isinstance(seed, Integral):
        raise ConfigError(f"seed must be a whole number, not {seed!r}")
    return int(seed)


def check_integer(name: str, value: object, low: int = 1) -> None:
    """Raise ConfigError if a value is no whole number of at least ``low``.

    >>> check_integer("group_bytes", 0)
    Traceback (most recent call last):
    grace.errors.ConfigError: group_bytes must be a whole number of at least 1, not 0
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}")
