"""What a plan may lose: classes of methods, and a budget of errors.

A method's class is the first of :data:`CLASSES` that it is in, by its traits and its memory:

    exact       C(x) = x
    half        values travel as 16-bit floats
    unbiased    E[C(x)] = x, and no memory
    feedback    E||x - C(x)||^2 < ||x||^2, and a memory that sends the rest later

A plan of a class may have methods of it and of those before it. Votes, methods and memories with a momentum of their
own (the optimizer's would have to be 0), biased methods without a memory and noisy ones with it are in no class, and
are, as delayed exchanges, considered only if the user names them.

Within its class a plan is bounded by its error, as L-GreCo bounds it (Markov et al., MLSys 2024, arXiv 2210.17357):
with x_v a variable's gradient on one rank,

    sum_v ||x_v - C_v(x_v)||^2  <=  sum_v ||x_v - R(x_v)||^2

where R is a reference that is known to train well, at the same parameters for all variables. It is a sum over variables
and not a bound on each, so that what is lost goes where it saves most time; of squares, since errors of different
variables are at right angles to each other; of one rank and one step, since that is what captured gradients tell, and
what both error feedback's and unbiased methods' rates of convergence depend on. What a mean over ranks averages out is
left out on both sides. Where means are compressed again (scatter_reduce, reduce_broadcast) and no memory keeps the
error of that, it counts twice.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.core.registry import make
from grace.core.variable import Variable
from grace.errors import ConfigError
from grace.planner.expected import expected_error

CLASSES = ("exact", "half", "unbiased", "feedback")
RECOMPRESSING = ("scatter_reduce", "reduce_broadcast")
ROUNDING = 2.0**-22
"""The largest squared relative error of rounding to a 16-bit float (float16, of numbers above 6e-5)."""
SLACK = 1 + 1e-9
"""For rounding: sums are taken in different orders."""


def class_of(compressor: Any, memory: Any = None) -> str | None:
    """The class of a method with its memory (the compressor's default if left out); None if it is in none.

    >>> [class_of(spec) for spec in ("none", "bf16", "qsgd", "topk", "signsgd", "dgc", "dynamic8")]
    ['exact', 'half', 'unbiased', 'feedback', None, None, None]
    >>> class_of("dynamic8", "residual"), class_of("qsgd", "residual")
    ('feedback', None)
    """
    made: Any = make("compressor", compressor)
    kept: Any = make("memory", made.traits.memory if memory is None else memory)
    traits = made.traits
    if made.votes or made.owns_momentum or kept.owns_momentum or (traits.needs_memory and not kept.stateful):
        return None
    if kept.stateful:
        return "feedback" if traits.contraction and not made.noisy and not traits.exact else None
    if traits.exact:
        return "exact"
    bits = made.wire_bits((1024,))
    if traits.summable and traits.carries_nonfinite and bits is not None and bits >= 16:
        return "half"
    return "unbiased" if traits.unbiased else None


def allows(quality: str, found: str | None) -> bool:
    """Whether a plan of a class may have a method of another.

    >>> allows("unbiased", "half"), allows("half", "feedback"), allows("feedback", None)
    (True, False, False)
    """
    return found is not None and CLASSES.index(found) <= CLASSES.index(quality)


def check_quality(quality: str) -> None:
    """Refuse what is no class.

    Raises:
        ConfigError: naming those that there are.
    """
    if quality not in CLASSES:
        raise ConfigError(f"quality must be one of {', '.join(map(repr, CLASSES))}, not {quality!r}")


def shrinks(compressor: Any, variable: Variable) -> bool:
    """Whether a method makes a variable's gradient smaller; else it travels as it is, and nothing is lost.

    >>> shrinks(make("compressor", "powersgd"), Variable("bias", (64,)))
    False
    """
    if compressor.traits.exact or not variable.numel:
        return False
    bits = compressor.wire_bits(variable.shape)
    return bits is None or bits < variable.bits


@dataclass(frozen=True)
class Errors:
    """What methods lose of each variable: as measured on captured gradients, else as expected of Gaussian ones.

    Args:
        measured: ``||x - C(x)||^2`` by the method's spec and the variable's name.
        norms: ``||x||^2`` by name; of variables without one every element counts as much as the mean of the others,
            and 1 if there are none.
    """

    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    usual: float = 1.0

    @classmethod
    def of(
        cls, variables: Sequence[Variable], measured: Mapping[str, Mapping[str, float]], norms: Mapping[str, float]
    ) -> "Errors":
        """Those of a model.

        >>> Errors.of([Variable("w", (3, 4)), Variable("v", (4,))], {}, {"w": 24.0}).norm(Variable("v", (4,)))
        8.0
        """
        known = [v for v in variables if v.name in norms and v.numel]
        elements = sum(v.numel for v in known)
        mean = sum(norms[v.name] for v in known) / elements if elements else 1.0
        return cls(measured, norms, mean)

    def norm(self, variable: Variable) -> float:
        """``||x||^2``, known or taken."""
        found = self.norms.get(variable.name)
        return self.usual * variable.numel if found is None else found

    def of_method(self, method: str, variable: Variable) -> float:
        """``||x - C(x)||^2``; 0 of what the method would not shrink, and of votes, whose aggregate is no mean.

        Args:
            method: the compressor's spec.
            variable: of the model.

        >>> round(Errors().of_method("topk(ratio=0.01)", Variable("w", (1000, 1000))) / 1e6, 4)
        0.9155
        """
        compressor = _made(method)
        if compressor.votes or not shrinks(compressor, variable):
            return 0.0
        found = self.measured.get(compressor.spec, {}).get(variable.name)
        return self.norm(variable) * expected_error(compressor.spec, variable.shape) if found is None else found

    def budget(self, reference: str, variables: Sequence[Variable]) -> float:
        """What the reference loses of all of them, and no less than rounding to 16-bit floats may: u^2 ||x||^2, with
        u = 2^-11, unless it is exact: some gradients others keep whole too, as PowerSGD does those of few samples.

        Raises:
            ConfigError: the reference has an aggregate that is no mean.
        """
        if make("compressor", reference).votes:
            raise ConfigError(
                f"reference={reference!r} votes: it has no error that others could be compared with; take another, "
                "as powersgd(rank=4)"
            )
        rounding = 0.0 if _made(reference).traits.exact else ROUNDING * sum(self.norm(v) for v in variables)
        return max(rounding, sum(self.of_method(reference, variable) for variable in variables))


@functools.cache
def _made(method: str) -> Any:
    return make("compressor", method)


def times(sync: str, memory: str) -> int:
    """How often a plan counts the error of a part, by its type of synchronization and memory.

    >>> times("scatter_reduce", "none"), times("scatter_reduce", "residual"), times("allgather", "none")
    (2, 1, 1)
    """
    return 2 if sync in RECOMPRESSING and not make("memory", memory).stateful else 1
