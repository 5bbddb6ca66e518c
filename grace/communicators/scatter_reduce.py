"""ScatterReduce: every rank averages one shard and sends it to all; both ways are compressed."""

from grace.core.communicator import Communicator, CompressorArg, MeanCompression, MemoryArg
from grace.core.component import Component
from grace.core.compressor import Compressor
from grace.core.memory import Memory
from grace.core.route import ALL_GATHER, ALL_TO_ALL, Carries, EngineTraits, Leg, Route


class ScatterReduce(Communicator):
    """Communicator by a compressed reduce-scatter and all-gather: traffic per rank does not grow with the number of
    ranks.

        1. each variable is cut into W shards, and shard j goes to rank j, compressed (all-to-all)
        2. rank j decodes and averages its shard in float32, and compresses the mean
        3. the compressed means are sent to all ranks (all-gather)

    The second compression has a memory of its own, of the same kind as the first's. For value quantizers
    and casts; with ``cast`` it is a 16-bit wire with float32 sums.

    >>> ScatterReduce("qsgd(levels=7)").describe()
    'scatter_reduce, qsgd(levels=7), none'
    """

    name = "scatter_reduce"
    cost = "~2p"
    piecewise = True

    def __init__(
        self, compressor: CompressorArg = "none", memory: MemoryArg | None = None, world_size: int | None = None
    ):
        super().__init__(compressor, memory, world_size)
        self.shard_memory: Memory = self.memory.answering()
        self.bind(self.context)

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        if not compressor.traits.shardable:
            return "it is no value quantizer or cast, and its shards cannot be compressed again"
        if compressor.stateful:
            return "it keeps something of the whole variable, and is given shards of it"
        return None

    @property
    def components(self) -> dict[str, Component]:
        """The direct parts, and the memory of the second compression."""
        return {**super().components, "shard_memory": self.shard_memory}

    @property
    def mean_compression(self) -> MeanCompression:
        """The compression of means: the same method, with a memory of its own and random numbers of this rank."""
        return MeanCompression(self.compressor, self.shard_memory, f"mean_{self.context.rank}")

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        return [Leg(ALL_TO_ALL, Carries.GRADIENTS), Leg(ALL_GATHER, Carries.MEANS)]
