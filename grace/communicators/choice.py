"""Construction of the communicator from the user's choices, and the default communicator of a method."""

from typing import Any

from grace.core import specs
from grace.core.communicator import Communicator, CommunicatorArg, CompressorArg, MemoryArg
from grace.core.component import is_ours
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import checked, known, make
from grace.errors import ConfigError

GATHER, SCATTER = "allgather", "scatter_reduce"
LONG = 1 << 20
"""Number of elements of the tensor for which a method's variance is computed."""
MOST_RANKS = 1 << 20
"""Largest number of ranks that :func:`break_even` tries."""


def build_communicator(
    compressor: CompressorArg | None, memory: MemoryArg | None, communicator: CommunicatorArg | None, ranks: int = 1
) -> Communicator:
    """Return the communicator for the user's three choices; each is a spec, an object or None (default).

    Args:
        compressor, memory, communicator: the choices.
        ranks: number of ranks that exchange with each other, for the default communicator.

    Raises:
        ConfigError: unknown names or parameters, or parts that do not go together.

    >>> build_communicator("topk", None, None).describe()
    'allgather, topk, residual'
    >>> [build_communicator("qsgd", None, None, ranks).name for ranks in (3, 4)]
    ['allgather', 'scatter_reduce']
    """
    if isinstance(compressor, Communicator) and communicator is None:  # GRACE passes the communicator in first position
        communicator, compressor = compressor, None
    if isinstance(communicator, Communicator):
        if compressor is not None or memory is not None:
            raise ConfigError("the communicator object holds its compressor and memory; do not pass them as well")
        if "compressor" not in vars(communicator):
            raise ConfigError(
                f"{type(communicator).__name__}.__init__() must call super().__init__(compressor, memory), which a "
                "dataclass does not"
            )
        return communicator
    chosen: Compressor = make("compressor", "none" if compressor is None else compressor)
    by_default = communicator is None
    name, parameters = specs.parse(
        default_communicator(chosen, memory, ranks) if communicator is None else communicator
    )
    if name not in known("communicator"):
        make("communicator", name)  # raises, naming what is known
    cls: Any = known("communicator")[name]
    built: Communicator = cls(chosen, memory, **checked("communicator", name, parameters))
    built.by_default = by_default
    return built


def default_communicator(compressor: Compressor, memory: MemoryArg | None = None, ranks: int = 1) -> str:
    """Return the name of a method's default communicator: its ``traits.communicator``, or scatter_reduce for
    :func:`break_even` or more ranks.

    >>> [default_communicator(make("compressor", "natural"), ranks=ranks) for ranks in (2, 8)]
    ['allgather', 'scatter_reduce']
    """
    least = break_even(compressor, memory) if ranks > 1 else None
    return compressor.traits.communicator if least is None or ranks < least else SCATTER


def break_even(compressor: Compressor, memory: MemoryArg | None = None) -> int | None:
    """Return the least number of ranks W for which scatter_reduce is a method's default instead of allgather; None if
    it never is.

    For a payload of p bytes an all-gather sends (W-1) p from each rank. ScatterReduce sends (W-1)/W p twice: first
    while gradients are still computed, like an all-gather, then after all of them, where no computation hides it, so
    that it counts twice. It also rounds the mean once more. With E||C(x) - x||^2 <= omega ||x||^2 the error of an
    all-gather's mean is at most omega/W of ||x||^2, that of ScatterReduce's omega/W + omega, and the number of training
    steps is assumed to grow by the same factor. So ScatterReduce is the default if

        3 (W-1)/W (1 + omega/W + omega)  <  (W-1) (1 + omega/W)

    omega is 0 if the second error is kept and sent later (memories), or does not exist (votes: the sign of a vote is
    the vote); else it is the method's ``variance``, or 1 if that is unknown. Users' own compressors and memories keep
    their ``traits.communicator``.

    Args:
        compressor: the method.
        memory: its memory, or the spec of one; its default if left out.

    >>> {spec: break_even(make("compressor", spec)) for spec in ("qsgd", "qsgd(levels=7)", "terngrad", "efsignsgd")}
    {'qsgd': 4, 'qsgd(levels=7)': 10, 'terngrad': 6, 'efsignsgd': 4}
    >>> break_even(make("compressor", "topk")) is None
    True
    """
    kept: Memory = make("memory", compressor.traits.memory if memory is None else memory)
    parts = [*compressor.named_components().values(), *kept.named_components().values()]
    cls: Any = known("communicator")[SCATTER]
    if compressor.traits.communicator != GATHER or not all(is_ours(type(part)) for part in parts):
        return None
    if cls.accepts(compressor) is not None:
        return None
    omega = 0.0
    if not (compressor.votes or kept.stateful):
        variance = compressor.variance(LONG)
        omega = 1.0 if variance is None else variance
    # The inequality of the docstring, divided by (W-1)/W.
    pays = (w for w in range(2, MOST_RANKS) if 3 * (1 + omega / w + omega) < w * (1 + omega / w))
    return next(pays, None)


def took_default(communicator: Communicator, saved: str, now: str) -> bool:
    """Return True if two descriptions differ only by default communicators: the run's is the default for its number of
    ranks, and the saved one for another number (or for an earlier version, which had no such rule).

    >>> here = build_communicator("qsgd", None, None, ranks=8)
    >>> took_default(here, "allgather, qsgd, none", "scatter_reduce, qsgd, none")
    True
    """
    # Descriptions begin with the communicator's name.
    (before, rest), (after, others) = (text.partition(", ")[::2] for text in (saved, now))
    return communicator.by_default and rest == others and {before, after} <= {GATHER, SCATTER}
