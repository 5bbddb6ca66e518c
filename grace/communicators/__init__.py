"""The communicators, one file each; :mod:`grace.core.registry` finds them here."""

from grace.communicators.allgather import Allgather
from grace.communicators.allreduce import Allreduce
from grace.communicators.broadcast import Broadcast
from grace.communicators.reduce_broadcast import ReduceBroadcast
from grace.communicators.scatter_merge import ScatterMerge
from grace.communicators.scatter_reduce import ScatterReduce

__all__ = ["Allgather", "Allreduce", "Broadcast", "ReduceBroadcast", "ScatterMerge", "ScatterReduce"]
