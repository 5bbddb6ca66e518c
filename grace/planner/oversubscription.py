"""Ranks that share cores: the factor by which computing takes longer when all of them compute, as they do in a step."""

import os
from collections.abc import Sequence

from grace.core.backend import Backend
from grace.session.agreement import gather_or_raise


def oversubscription(backend: Backend, nodes: Sequence[str]) -> float:
    """Return the factor by which a codec, which computes in one thread, takes longer when all ranks of a node are at
    theirs than when one is alone: ranks per core, of the node that has most; 1 where every rank has a core. Every rank
    must call it.

    Args:
        backend: of the ranks.
        nodes: the name of each rank's node.

    >>> from grace.core.backend import LocalBackend
    >>> oversubscription(LocalBackend(), ["here"])
    1.0
    """
    told = gather_or_raise(backend, "cores", cores())
    found = 1.0
    for node in set(nodes):
        here = [mine for name, mine in zip(nodes, told, strict=True) if name == node]
        found = max(found, len(here) / max(1, len(set().union(*here))))
    return found


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
