"""Cluster that builders build for when a program runs: the ranks' hosts, and facts of them from a file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from grace.backends.topology import Topology
from grace.errors import ConfigError
from grace.strategy.builder import Cluster

if TYPE_CHECKING:  # it needs pydantic, which a run without a strategy does not
    from grace.launch.cluster import Resources

ResourcesArg = Union[str, Path, dict[str, Any], "Resources"]
"""Cluster as users give it: a resource file's path, its document, or the object."""
RESOURCES = "GRACE_RESOURCES"
"""Environment variable by which ``grace launch -r`` names the file."""


def cluster_of(resources: ResourcesArg | None, ranks: Topology) -> Cluster:
    """Return the cluster for builders: the nodes of a file, where it describes this run's ranks; else the ranks' hosts.

    Args:
        resources: a file's path, a document, or :class:`~grace.launch.cluster.Resources`. If None, the file of
            :data:`RESOURCES` counts, which is for the whole run: an optimizer over some ranks does not use it.
        ranks: the ranks with their hosts.

    Raises:
        ConfigError: resources cannot be read, or are of other ranks, or of ranks on other nodes.

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
        read = Resources.from_document(resources)
    elif isinstance(resources, Resources):
        read = resources
    else:
        raise ConfigError(f"{source} must be a file's path or Resources, not a {type(resources).__name__}")
    where = f"{source} {resources}" if isinstance(resources, (str, Path)) else source
    if read.world_size != ranks.world_size:
        if source == RESOURCES and ranks.world_size < read.world_size:
            return ranks  # an optimizer over some of the ranks: the variable is for the whole run
        raise ConfigError(
            f"{where}: it describes {read.world_size} ranks, and there are {ranks.world_size}: a node has one per GPU, "
            "or else per CPU that is listed; start as many, as grace launch -r does"
        )
    hosts = ranks.ranks
    # Two ranks must share a node in the file if, and only if, they share a host.
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


def to_plain(resources: ResourcesArg) -> str | dict[str, object]:
    """Return resources in a form that JSON can hold."""
    if isinstance(resources, Path):
        return str(resources)
    return resources if isinstance(resources, (str, dict)) else resources.model_dump()
