"""Routes: the collectives of a bucket's exchange as data, and the bytes that each rank sends by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from grace.core.backend import Backend, Handle, Tensor
from grace.kernels import kernels_of


class Carries(Enum):
    """Contents of the buffer of a leg."""

    GRADIENTS = "the gradients, encoded; where each rank owns a piece, a wire for each owner, one behind the other"
    ROUND = "the next wire of a method of several rounds, made of the sum that came"
    MEANS = "the means that its sender (an owner, the root) has decoded, encoded once more"
    SUMS = "the sum of the wires (or parts of wires) that came, added in float32 and rounded once"
    SIZES = "the first dimension and the dtype of every payload tensor that the next leg carries"
    DIGESTS = "how payloads are laid out, so that ranks compare it"
    HEADERS = "a header without payloads: the communicator moves these itself"


@dataclass(frozen=True)
class Collective:
    """One collective of an engine: its start, and its cost.

    Attributes:
        name: the name in messages, in traces and in the planner.
        start: function that starts it with a 1-d tensor, and the root if it has one; the result is the list of tensors
            received.
        sent: bytes that a rank sends for a buffer of ``nbytes``: ``sent(nbytes, ranks, rank, root)``. Backends count
            equally many.
    """

    name: str
    start: Callable[[Backend, Tensor, int | None], Handle]
    sent: Callable[[float, int, int, int | None], float]


def as_bytes(wire: Tensor, collective: Callable[[Tensor], Handle]) -> Handle:
    """Start a collective that only moves numbers. bfloat16, which engines may not know, is sent as bytes."""
    k = kernels_of(wire)
    dtype = k.dtype(wire)
    if dtype != "bfloat16":
        return collective(wire)

    def numbers(raw: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        return [numbers(one) for one in raw] if isinstance(raw, list) else k.from_bytes(raw, dtype, tuple(wire.shape))

    return collective(k.to_bytes(wire)).map(numbers)


def as_list(result: Tensor) -> list[Tensor]:
    """Return a single result as a list, which results of a :class:`Collective` are."""
    return [result]


def _all_reduce(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    return backend.allreduce(wire).map(as_list)


def _all_gather(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    return backend.allgather(wire)


def _concatenate(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    return backend.concatenate(wire)


def _each_broadcasts(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    k, dtype, shape = kernels_of(wire), kernels_of(wire).dtype(wire), tuple(wire.shape)
    buffers = [wire if rank == backend.rank else k.zeros(shape, dtype, wire) for rank in range(backend.size)]
    return Handle.all([backend.broadcast(buffer, rank) for rank, buffer in enumerate(buffers)])


def _all_to_all(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    return backend.alltoall(wire)


def _gather(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    assert root is not None
    return as_bytes(wire, lambda raw: backend.gather(raw, root))


def _broadcast(backend: Backend, wire: Tensor, root: int | None) -> Handle:
    assert root is not None
    return as_bytes(wire, lambda raw: backend.broadcast(raw, root)).map(as_list)


def _bytes_of_all_reduce(nbytes: float, ranks: int, rank: int, root: int | None) -> float:
    # A reduce-scatter and an all-gather around the ring: (W-1)/W of the buffer each.
    return 2 * (ranks - 1) / ranks * nbytes


def _bytes_of_all_gather(nbytes: float, ranks: int, rank: int, root: int | None) -> float:
    return (ranks - 1) * nbytes


def _bytes_of_all_to_all(nbytes: float, ranks: int, rank: int, root: int | None) -> float:
    return (ranks - 1) / ranks * nbytes


def _bytes_of_gather(nbytes: float, ranks: int, rank: int, root: int | None) -> float:
    return 0.0 if rank == root else nbytes


def _bytes_of_broadcast(nbytes: float, ranks: int, rank: int, root: int | None) -> float:
    return (ranks - 1) * nbytes if rank == root else 0.0


ALL_REDUCE = Collective("allreduce", _all_reduce, _bytes_of_all_reduce)
ALL_GATHER = Collective("allgather", _all_gather, _bytes_of_all_gather)
CONCATENATE = Collective("allgather", _concatenate, _bytes_of_all_gather)
"""All-gather of engines that gather buffers of unequal lengths themselves."""
EACH_BROADCASTS = Collective("broadcast", _each_broadcasts, _bytes_of_all_gather)
ALL_TO_ALL = Collective("alltoall", _all_to_all, _bytes_of_all_to_all)
GATHER = Collective("gather", _gather, _bytes_of_gather)
BROADCAST = Collective("broadcast", _broadcast, _bytes_of_broadcast)
DIRECT_BYTES = 1 << 22
"""Bytes that a rank gets in an all-gather, up to which each rank sends its own part to all others at once. Larger parts
go around a ring."""


@dataclass(frozen=True)
class Leg:
    """One collective of a route.

    Attributes:
        collective: see :class:`Collective`.
        carries: the contents of its buffer.
        root: the root of a rooted collective, the only rank that sends means or sums. None: every rank sends them.
        reduce_scatters: True if this all-to-all is half of a reduce-scatter of plain numbers: each rank gets, and adds
            up, an equal part.
    """

    collective: Collective
    carries: Carries
    root: int | None = None
    reduce_scatters: bool = False

    def sent(self, nbytes: float, ranks: int, rank: int) -> float:
        """Return the bytes that a rank sends for a buffer of ``nbytes`` bytes."""
        return self.collective.sent(nbytes, ranks, rank, self.root)


Route = Sequence[Leg]


@dataclass(frozen=True)
class EngineTraits:
    """Facts of the engine, and of the device of gradients, that routes depend on.

    Attributes:
        ranks: number of ranks that exchange with each other.
        by_ring: True if the engine's sums of small wires go around a ring of ranks.
        concatenates: True if the engine gathers buffers of unequal lengths itself.
        on_cpu: True if gradients lie in the memory of the host.
    """

    ranks: int = 1
    by_ring: bool = False
    concatenates: bool = False
    on_cpu: bool = True


def route_of(
    route_of_wire: Callable[[float, EngineTraits], Route],
    wires: Sequence[float],
    engine: EngineTraits,
    varies: bool = False,
) -> Route:
    """Return the route of a bucket: a communicator's legs for each of the method's rounds. Legs that exchange sizes are
    inserted before payloads that differ in size.

    Args:
        route_of_wire: a communicator's legs of one wire, by the wire's bytes and the engine's traits.
        wires: bytes of the wire of each round.
        engine: the engine's traits.
        varies: True if payloads may differ in size.
    """
    route: list[Leg] = []
    for number, nbytes in enumerate(wires):
        for leg in route_of_wire(nbytes, engine):
            # A later round's wire is made from the sums of the one before, not from gradients.
            later = number > 0 and leg.carries is Carries.GRADIENTS
            route.append(replace(leg, carries=Carries.ROUND) if later else leg)
    return _with_sizes(route, engine.concatenates) if varies else route


def _with_sizes(route: Route, concatenates: bool) -> Route:
    """Return a route with legs that exchange the sizes of payloads. If the engine gathers unequal lengths itself, sizes
    travel in front of the payload instead."""
    first = route[0]
    if concatenates and first.collective is ALL_GATHER:
        return [replace(first, collective=CONCATENATE), *route[1:]]
    found = [Leg(ALL_GATHER, Carries.SIZES)]
    for leg in route:
        # Owners compress means anew, so sizes travel once more.
        if leg.carries is Carries.MEANS:
            found.append(replace(leg, carries=Carries.SIZES))
        found.append(leg)
    return found
