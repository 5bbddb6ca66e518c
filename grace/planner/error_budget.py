"""The error budget of a plan: classes of methods, and a bound on the error of every variable.

A method's class is the first of :data:`CLASSES` that it is in, by its traits and its memory:

    exact       C(x) = x
    half        values travel as 16-bit floats
    unbiased    E[C(x)] = x, and no memory
    feedback    E||x - C(x)||^2 < ||x||^2, and a memory that sends the rest later

A plan of a class may have methods of it and of those before it. Votes, methods and memories with a momentum of their
own (the optimizer's would have to be 0), biased methods without a memory and noisy ones with it are in no class, and
are considered only if the user names them.

Within its class every variable is bounded by itself, by the relative error e(C, x) = ||x - C(x)||^2 / ||x||^2 of one
rank's captured gradient, on which the rates of error feedback and of unbiased methods depend:

    matrices          e(C, x) <= e(R, x), where R is a reference that is known to train well, powersgd(rank=4);
                      of another family than R's, besides e(C, x) <= 0.3
    tables, vectors   e(C, x) <= 0.3; low-rank methods do not suit them

A table is a matrix most of whose rows have no gradient in a step. A sum over variables would be no bound: it lets a
table lose everything, where other variables have larger gradients. Families differ in what training loses at one error:
an adaptive optimizer (Adam) divides each element by its own history, and an element that a sparsifier sends late comes
at a size that history does not know. So sparsifiers may lose 0.01 there: the elements that are not sent are zeros.
"""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import make
from grace.core.specs import Spec
from grace.core.variable import Variable
from grace.errors import ConfigError

CLASSES = ("exact", "half", "unbiased", "feedback")
REFERENCE = "powersgd(rank=4)"
"""The method whose error on a matrix others may have, unless the user names another."""
LARGEST = 0.3
"""The largest relative error of tables and vectors, and of methods of another family than the reference's."""
SPARSIFIED_ADAPTIVE = 0.01
"""The largest relative error of sparsifiers under an adaptive optimizer."""
RECOMPRESSING = ("scatter_reduce", "reduce_broadcast")
"""Communicators that compress means again: without a memory the error counts twice."""
ROUNDING = 2.0**-22
"""The largest squared relative error of rounding to a 16-bit float (float16, of numbers above 6e-5)."""
SLACK = 1 + 1e-9
"""A factor for rounding errors of bounds."""
SIDE, LONG = 256, 1 << 14
"""The largest side of a synthetic matrix, and the elements of a synthetic vector."""
SPECTRUM = math.log(0.15) / -math.log(5)
"""p of synthetic matrices, whose energy behind r directions is (1 + r)^-p: rank 4 leaves .15 of it."""


@functools.cache
def _compressor(spec: str) -> Compressor:
    return make("compressor", spec)  # type: ignore[no-any-return]


def class_of(compressor: Spec | Compressor, memory: Spec | Memory | None = None) -> str | None:
    """Return the class of a method with its memory (the compressor's default if left out); None if it is in none.

    >>> [class_of(spec) for spec in ("none", "bf16", "qsgd", "topk", "signsgd", "dgc", "dynamic8")]
    ['exact', 'half', 'unbiased', 'feedback', None, None, None]
    >>> class_of("dynamic8", "residual"), class_of("qsgd", "residual")
    ('feedback', None)
    """
    made: Compressor = make("compressor", compressor)
    kept: Memory = make("memory", made.traits.memory if memory is None else memory)
    traits = made.traits
    if made.votes or made.owns_momentum or kept.owns_momentum or (traits.needs_memory and not kept.stateful):
        return None
    if kept.stateful:
        return "feedback" if traits.contraction and not made.noisy and not traits.exact else None
    if traits.exact:
        return "exact"
    bits = made.wire_bits((1024,))  # a cast takes as many for each element of any shape
    if traits.summable and traits.carries_nonfinite and bits is not None and bits >= 16:
        return "half"
    return "unbiased" if traits.unbiased else None


def allows(quality: str, found: str | None) -> bool:
    """Return True if a plan of a class may have a method of another.

    >>> allows("unbiased", "half"), allows("half", "feedback"), allows("feedback", None)
    (True, False, False)
    """
    return found is not None and CLASSES.index(found) <= CLASSES.index(quality)


def check_quality(quality: str) -> None:
    """Raise ConfigError if there is no such class; it names those that there are."""
    if quality not in CLASSES:
        raise ConfigError(f"quality must be one of {', '.join(map(repr, CLASSES))}, not {quality!r}")


def shrinks(compressor: Compressor, variable: Variable) -> bool:
    """Return True if a method makes a variable's gradient smaller; else it travels uncompressed.

    >>> shrinks(make("compressor", "powersgd"), Variable("bias", (64,)))
    False
    """
    if compressor.traits.exact or not variable.numel:
        return False
    bits = compressor.wire_bits(variable.shape)
    return bits is None or bits < variable.bits


@dataclass(frozen=True)
class ErrorModel:
    """The relative errors of methods on a model's gradients, and their bounds.

    Args:
        measured: ||x - C(x)||^2 / ||x||^2 on captured gradients, by the method's spec and the variable's name; errors
            that nobody measured are those of synthetic gradients.
        tables: names of tables.
        adaptive: True if the optimizer divides each element by its history, as Adam does.
        reference: the spec of R.

    >>> model = ErrorModel(measured={"topk": {"w": 0.9}, "powersgd(rank=4)": {"w": 0.95}, "qsgd": {"w": 0.01}})
    >>> w = Variable("w", (512, 512))
    >>> [round(model.share(method, "allgather", "none", w), 2) for method in ("topk", "powersgd(rank=4)", "qsgd")]
    [3.0, 1.0, 0.03]
    """

    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    tables: Collection[str] = ()
    adaptive: bool = False
    reference: str = REFERENCE

    def __post_init__(self) -> None:
        if make("compressor", self.reference).votes:
            raise ConfigError(
                f"reference={self.reference!r} votes: it has no error that others could be compared with; take "
                "another, as powersgd(rank=4)"
            )

    def error(self, method: str, variable: Variable) -> float:
        """Return ||x - C(x)||^2 / ||x||^2; 0 if the method does not shrink the variable, or votes."""
        compressor = _compressor(method)
        if compressor.votes or not shrinks(compressor, variable):
            return 0.0
        found = self.measured.get(compressor.spec, {}).get(variable.name)
        return synthetic_error(compressor.spec, variable.shape) if found is None else found

    def bound(self, method: str, variable: Variable) -> float:
        """Return the largest relative error that a method may have on a variable."""
        compressor, reference = _compressor(method), _compressor(self.reference)
        if reference.traits.exact:  # then nothing may be lost
            return 0.0
        family = compressor.traits.category
        if self.adaptive and family == "sparsification" != reference.traits.category:
            return SPARSIFIED_ADAPTIVE
        if variable.sparse or variable.name in self.tables or not shrinks(reference, variable):
            return LARGEST
        known = max(ROUNDING, self.error(self.reference, variable))  # some gradients have few directions at all
        return known if family == reference.traits.category else min(known, LARGEST)

    def share(self, method: str, communicator: str, memory: str, variable: Variable) -> float:
        """Return the part of its bound that a variable's error takes: 1 is all of it."""
        error = self.error(method, variable)
        if not error:
            return 0.0
        if communicator in RECOMPRESSING and not make("memory", memory).stateful:
            error *= 2
        bound = self.bound(method, variable)
        return error / bound if bound else math.inf


@functools.cache
def synthetic_error(method: str, shape: tuple[int, ...]) -> float:
    """Return a method's relative error on a synthetic gradient of about this shape: a matrix with few strong
    directions, or a Gaussian vector; of at most :data:`SIDE` rows and columns, drawn with a fixed seed.

    >>> 0.1 < synthetic_error("powersgd(rank=4)", (1000, 1000)) < 0.4, synthetic_error("none", (9,))
    (True, 0.0)
    """
    small: tuple[int, ...] = (min(LONG, max(1, math.prod(shape))),)
    if len(shape) > 1:
        small = min(SIDE, shape[0]), min(SIDE, math.prod(shape[1:]))
    if small != shape:
        return synthetic_error(method, small)  # so that all large shapes share one cached result
    compressor, x = make("compressor", method), _synthetic(shape)  # one of its own, which may keep state
    if compressor.traits.exact:
        return 0.0
    payload, ctx = compressor.compress(x, "synthetic")
    lost = x - np.asarray(compressor.decompress(payload, ctx)).reshape(x.shape)
    return float(np.sum(lost.astype("float64") ** 2) / np.sum(x.astype("float64") ** 2))


@functools.cache
def _synthetic(shape: tuple[int, ...]) -> np.ndarray:
    draws = np.random.default_rng(0)
    if len(shape) < 2:
        return draws.standard_normal(shape).astype("float32")
    left, right = (np.linalg.qr(draws.standard_normal((side, side)))[0] for side in shape)
    rank = min(shape)
    tails = np.append((1 + np.arange(float(rank))) ** -SPECTRUM, 0)
    return (left[:, :rank] * np.sqrt(tails[:-1] - tails[1:]) @ right[:rank]).astype("float32")
