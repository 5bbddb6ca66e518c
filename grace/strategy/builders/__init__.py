"""Strategy builders, one file each; :mod:`grace.core.registry` finds them here."""

from grace.strategy.builders.all_reduce import AllReduce
from grace.strategy.builders.by_type import ByType
from grace.strategy.builders.diloco import DiLoCo
from grace.strategy.builders.parallax import Parallax
from grace.strategy.builders.partitioned_all_reduce import PartitionedAllReduce
from grace.strategy.builders.partitioned_ps import PartitionedPS
from grace.strategy.builders.ps import PS
from grace.strategy.builders.ps_load_balancing import PSLoadBalancing
from grace.strategy.builders.random_axis_partition_all_reduce import RandomAxisPartitionAllReduce
from grace.strategy.builders.size_threshold import SizeThreshold
from grace.strategy.builders.sparseloco import SparseLoCo
from grace.strategy.builders.streaming_diloco import StreamingDiLoCo
from grace.strategy.builders.uneven_partitioned_ps import UnevenPartitionedPS
from grace.strategy.builders.uniform import Uniform

__all__ = [
    "PS",
    "AllReduce",
    "ByType",
    "DiLoCo",
    "PSLoadBalancing",
    "Parallax",
    "PartitionedAllReduce",
    "PartitionedPS",
    "RandomAxisPartitionAllReduce",
    "SizeThreshold",
    "SparseLoCo",
    "StreamingDiLoCo",
    "UnevenPartitionedPS",
    "Uniform",
]
