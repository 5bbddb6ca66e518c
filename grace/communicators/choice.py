"""Which communicator the user's choices mean, and which one a method gets where none is named."""

from typing import Any

from grace.core import specs
from grace.core.communicator import Communicator
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.registry import checked, known, make
from grace.core.transactional_dict import is_ours
from grace.errors import ConfigError

GATHER, SCATTER = "allgather", "scatter_reduce"
LONG = 1 << 20
"""Elements of a tensor whose variance stands for a method's."""
MOST_RANKS = 1 << 20
"""Beyond which nobody asks."""


def build_communicator(compressor: Any, memory: Any, communicator: Any, ranks: int = 1) -> Communicator:
    """The communicator that the user's three choices mean; each is a spec, an object or None (default).

    Args:
        compressor, memory, communicator: the choices.
        ranks: how many exchange with each other, for the default communicator.

    Raises:
        ConfigError: unknown names or parameters, or parts that do not go together.

    >>> build_communicator("topk", None, None).describe()
    'allgather, topk, residual'
    >>> [build_communicator("qsgd", None, None, ranks).name for ranks in (3, 4)]
    ['allgather', 'scatter_reduce']
    """
    if isinstance(compressor, Communicator) and communicator is None:  # GRACE gives it in this place
        communicator, compressor = compressor, None
    if isinstance(communicator, Communicator):
        if compressor is not None or memory is not None:
            raise ConfigError("the communicator object holds its compressor and memory; do not pass them as well")
        return communicator
    chosen: Any = make("compressor", "none" if compressor is None else compressor)
    named = communicator is not None
    name, parameters = specs.parse(communicator if named else default_communicator(chosen, memory, ranks))
    if name not in known("communicator"):
        make("communicator", name)  # raises, naming what is known
    cls: Any = known("communicator")[name]
    built: Communicator = cls(chosen, memory, **checked("communicator", name, parameters))
    built.by_default = not named
    return built


def default_communicator(compressor: Compressor, memory: Any = None, ranks: int = 1) -> str:
    """The communicator of a method for which none is named: its ``traits.communicator``, or scatter_reduce from
    :func:`break_even` ranks on.

    >>> [default_communicator(make("compressor", "natural"), ranks=ranks) for ranks in (2, 8)]
    ['allgather', 'scatter_reduce']
    """
    least = break_even(compressor, memory) if ranks > 1 else None
    return compressor.traits.communicator if least is None or ranks < least else SCATTER


def break_even(compressor: Compressor, memory: Any = None) -> int | None:
    """From how many ranks W on scatter_reduce is a method's default instead of allgather; None for never.

    Of a payload of p bytes an all-gather sends (W-1) p from each rank. ScatterReduce sends (W-1)/W p twice: the first
    time while gradients are still computed, as an all-gather does; the second time behind all of them, where nothing
    hides it, so that it counts twice. And it rounds the mean once more. With E||C(x) - x||^2 <= omega ||x||^2 the
    mean of an all-gather is off by at most omega/W of ||x||^2, that of ScatterReduce by omega/W + omega, and the steps
    that training takes are counted as growing by as much. So it is taken if

        3 (W-1)/W (1 + omega/W + omega)  <  (W-1) (1 + omega/W)

    omega is 0 where the second error is kept and sent later (memories), and where there is none (votes: the sign of a
    vote is the vote); the method's ``variance`` else; and 1 where nobody worked that out. Users' own compressors and
    memories stay with what they say.

    Args:
        compressor: the method.
        memory: its memory, or the spec of one; its default if left out.

    >>> {spec: break_even(make("compressor", spec)) for spec in ("qsgd", "qsgd(levels=7)", "terngrad", "efsignsgd")}
    {'qsgd': 4, 'qsgd(levels=7)': 10, 'terngrad': 6, 'efsignsgd': 4}
    >>> break_even(make("compressor", "topk")) is None
    True
    """
    kept: Memory = make("memory", compressor.traits.memory if memory is None else memory)
    parts = [*compressor.whole().values(), *kept.whole().values()]
    cls: Any = known("communicator")[SCATTER]
    if compressor.traits.communicator != GATHER or not all(is_ours(type(part)) for part in parts):
        return None
    if cls.accepts(compressor) is not None:
        return None
    omega = 0.0
    if not (compressor.votes or kept.stateful):
        variance = compressor.variance(LONG)
        omega = 1.0 if variance is None else variance
    pays = (w for w in range(2, MOST_RANKS) if 3 * (1 + omega / w + omega) < w * (1 + omega / w))
    return next(pays, None)


def took_default(communicator: Communicator, saved: str, now: str) -> bool:
    """Whether two descriptions differ only by a communicator that nobody named: this run's is the default for its
    number of ranks, and the saved one that for another number (or of an earlier version, which had no such rule).

    Args:
        communicator: this run's.
        saved, now: two descriptions, without parameters.

    >>> here = build_communicator("qsgd", None, None, ranks=8)
    >>> took_default(here, "allgather, qsgd, none", "scatter_reduce, qsgd, none")
    True
    """
    (before, rest), (after, others) = (text.partition(", ")[::2] for text in (saved, now))
    return communicator.by_default and rest == others and {before, after} <= {GATHER, SCATTER}
