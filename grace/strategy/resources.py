"""The cluster that builders build for when a program runs: the ranks' hosts, and what a file knows of them."""

import os
from pathlib import Path
from typing import Any

from grace.backends.topology import Topology
from grace.errors import ConfigError
from grace.strategy.builder import Cluster

RESOURCES = "GRACE_RESOURCES"
"""Where ``grace launch -r`` says which file."""


def cluster_of(resources: Any, ranks: Topology) -> Cluster:
    """What builders get: the nodes of a file, where it describes the ranks that there are; else the ranks' hosts.

    Args:
        resources: a file's path, a document, or :class:`~grace.launch.cluster.Resources`. If None, what
            :data:`RESOURCES` names counts, which is for the whole run: an optimizer over some ranks does without.
        ranks: on which hosts they are.

    Raises:
        ConfigError: they cannot be read, or are of other ranks, or of ranks on other nodes.

    >>> two = {"nodes": [{"address": "localhost", "cpus": [0, 1]}]}
    >>> cluster_of(two, Topology(["here", "here"])).nodes[0].cpus
    [0, 1]
    >>> cluster_of(two, Topology(["here", "there"]))
    Traceback (most recent call last):
    grace.errors.ConfigError: resources=: it puts ranks 0, 1 together on localhost, but they are on here, there: ...
    """
    source = "resources="
    if resources is None:
        resources, source = os.environ.get(RESOURCES), RESOURCES
    if not resources:
        return ranks
    from grace.launch.cluster import Resources

    if isinstance(resources, (str, Path)):
        read = Resources.load(resources)
    elif isinstance(resources, dict):
        read = Resources.of(resources)
    elif isinstance(resources, Resources):
        read = resources
    else:
        raise ConfigError(f"{source} must be a file's path or Resources, not a {type(resources).__name__}")
    where = f"{source} {resources}" if isinstance(resources, (str, Path)) else source
    if read.world_size != ranks.world_size:
        if source == RESOURCES and ranks.world_size < read.world_size:
            return ranks
        raise ConfigError(
            f"{where}: it describes {read.world_size} ranks, and there are {ranks.world_size}: a node has one per GPU, "
            "or else per CPU that is listed; start as many, as grace launch -r does"
        )
    hosts = ranks.ranks
    for rank, node in enumerate(read.ranks):
        for other in range(rank):
            if (read.ranks[other] == node) != (hosts[other] == hosts[rank]):
                together = "together on" if read.ranks[other] == node else "on two nodes,"
                nodes = dict.fromkeys(read.nodes[i].address for i in (read.ranks[other], node))
                raise ConfigError(
                    f"{where}: it puts ranks {other}, {rank} {together} {', '.join(nodes)}, but they are on "
                    f"{', '.join(dict.fromkeys((ranks.names[other], ranks.names[rank])))}: list the nodes in the "
                    "order of ranks, the chief first, or tell hosts of the same name apart by GRACE_NODE"
                )
    return read


def plain(resources: Any) -> Any:
    """Resources as what JSON can hold."""
    return str(resources) if isinstance(resources, Path) else getattr(resources, "model_dump", lambda: resources)()
