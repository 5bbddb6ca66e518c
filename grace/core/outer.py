"""Local steps: the contract of outer optimizers, and the settings of rounds."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal, get_args

from grace.core.compressor import Tensor
from grace.core.registry import make
from grace.core.schema_words import NATURAL, POSITIVE, FileForm, SpecForm
from grace.core.specs import Spec
from grace.core.transactional_dict import StatefulComponent
from grace.errors import ConfigError

OVER = Literal["ranks", "nodes"]


class OuterOptimizer(StatefulComponent):
    """Outer optimizer. Write ``step``.

    Ranks train alone, from a shared anchor a. After each period they exchange how far they have drifted, a - x, and the
    outer optimizer moves the anchor by the mean of the drifts, on all ranks alike. Writes to ``self.state`` take effect
    only if the round succeeded.

    >>> class Half(OuterOptimizer):
    ...     name = "half"
    ...     def step(self, anchor, drift, name):
    ...         return anchor - 0.5 * drift
    >>> Half().step(3.0, 2.0, "w")
    2.0
    """

    kind = "outer"
    shared_state = True
    stateful: ClassVar[bool] = True
    offload: bool = False
    """True to keep anchors and momenta on the CPU."""

    def step(self, anchor: Tensor, drift: Tensor, name: str) -> Tensor:
        """Return the next anchor of a variable; a new tensor of the anchor's shape and dtype.

        Args:
            anchor: the anchor, of float32 (of float64 for float64 parameters); it must not be changed.
            drift: the mean over ranks of the drifts, of the same dtype.
            name: the variable.
        """
        raise TypeError(f"{type(self).__name__} must define step(anchor, drift, name)")


OuterArg = Spec | OuterOptimizer
"""Outer optimizer as users give it: a spec or an object."""


@dataclass(frozen=True)
class Outer(FileForm):
    """Rounds in which ranks that train alone exchange how far they have drifted.

    Parameters are dealt to P fragments. Fragment p is sent when t + delay = (p + 1) H / P (mod H), where t counts
    iterations, and applied ``delay`` iterations later, when x = a + merge (x - a) with the new anchor a.

    Attributes:
        optimizer: spec of the outer optimizer; ``none`` averages.
        period: number H of iterations between two rounds of a fragment.
        fragments: number P of fragments, which travel at different times.
        delay: number of iterations for which a fragment may travel while training goes on.
        merge: share of its own drift that a rank keeps, from 0 to 1.
        over: "ranks", or "nodes": the ranks of a node average gradients in every iteration.

    >>> list(Outer("nesterov", period=5, fragments=2).faults())
    [('period', '5 iterations cannot be dealt to 2 fragments: it must be a multiple of fragments')]
    """

    # A dict, or an object, may have no hash.
    optimizer: Annotated[OuterArg, SpecForm()] = field(default="none", hash=False)
    period: int = field(kw_only=True, metadata=POSITIVE)
    fragments: int = field(default=1, metadata=POSITIVE)
    delay: int = field(default=0, metadata=NATURAL)
    merge: float = field(default=0.0, metadata={"strict": True, "ge": 0.0, "le": 1.0})
    over: OVER = "ranks"

    def to_dict(self) -> dict[str, object]:
        """Return the settings' form in a file: those that differ from their defaults, and optimizer and period.

        >>> Outer("nesterov(lr=0.7)", period=20).to_dict()
        {'optimizer': 'nesterov', 'period': 20}
        """
        changed = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        return {
            "optimizer": make("outer", self.optimizer).spec,
            **{k: v for k, v in changed.items() if k != "optimizer"},
        }

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield the faults of the settings: the field, and what would be right."""
        unfit = list(self.too_small())
        yield from unfit
        if unfit:  # the checks below divide by these numbers
            return
        try:
            make("outer", self.optimizer)
        except ConfigError as error:
            yield "optimizer", str(error)
        if self.period % self.fragments:
            yield (
                "period",
                f"{self.period} iterations cannot be dealt to {self.fragments} fragments: it must be a multiple of "
                "fragments",
            )
        elif self.delay >= self.period // self.fragments:
            yield (
                "delay",
                f"{self.delay} must be less than period / fragments = {self.period // self.fragments}: a fragment "
                "arrives before the next one is sent",
            )
        if isinstance(self.merge, bool) or not isinstance(self.merge, (int, float)) or not 0 <= self.merge <= 1:
            yield "merge", f"must be a number from 0 (take the anchor) to 1 (keep the own drift), not {self.merge!r}"
        if self.over not in get_args(OVER):
            yield "over", f"must be one of {', '.join(map(repr, get_args(OVER)))}, not {self.over!r}"

    def check(self) -> None:
        """Raise ConfigError, which names the field, if the settings cannot work."""
        for key, message in self.faults():
            raise ConfigError(f"outer, {key}: {message}")

    def describe(self) -> str:
        """Return the settings as text.

        >>> Outer("nesterov(lr=0.5)", period=20, fragments=2).describe()
        'outer nesterov(lr=0.5, period=20, fragments=2)'
        """
        named = self.to_dict()
        name, _, inside = str(named.pop("optimizer")).removesuffix(")").partition("(")
        settings = [*filter(None, [inside]), *(f"{key}={value}" for key, value in named.items())]
        return f"outer {name}({', '.join(settings)})"
