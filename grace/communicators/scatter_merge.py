"""ScatterMerge: every rank adds up the entries of some positions, and sends the largest sums to all."""

from grace.core.communicator import Communicator, CompressorArg, MemoryArg
from grace.core.compressor import Compressor, Sparsifier
from grace.core.route import ALL_GATHER, ALL_TO_ALL, Carries, EngineTraits, Leg, Route
from grace.exchange.merge_codec import MergeCodec


class ScatterMerge(Communicator):
    """Communicator that merges the entries of sparsifiers: a rank sends O(k) bytes, whatever the number of ranks.

    Rank i's sparsifier picks the entries S_i of x_i, k of them. Every position p has one owner among the W ranks.

        1. each entry goes to the owner of its position (all-to-all):   v_p = (1/W) sum_{i: p in S_i} x_i,p
        2. each owner keeps the k/W largest |v_p| of its positions; G is the set of all k positions
        3. these are sent to all ranks (all-gather), and the mean is v_p at p in G and 0 elsewhere

    Nothing is lost: rank i's memory is updated as if x_i,p was sent at p in S_i and G only, and so keeps the entries of
    positions outside of G in full, r_i = x_i - x_i[S_i and G] for the residual. Summed over ranks

        W mean + sum_i r_i = sum_i x_i = sum_i (gradient_i + r_i of the step before)

    An owner's share of a rank's k entries varies by chance; entries beyond four standard deviations are not sent, and
    stay in the memory, too. The mean has k entries, and not up to W k like that of an all-gather, so more is left for
    later steps.
    Sources: Ok-Topk, Li and Hoefler, PPoPP 2022, arXiv 2201.07598; gTop-k, Shi et al., ICDCS 2019, arXiv 1901.04359.

    >>> import numpy as np
    >>> merge = ScatterMerge("topk(ratio=0.5)")
    >>> merge.step(np.float32([4, 1]), "w")
    array([4., 0.], dtype=float32)
    """

    name = "scatter_merge"
    cost = "~2p"
    piecewise, codec_class = True, MergeCodec

    # Not "none", the default of other communicators: only sparsifiers have entries to merge.
    def __init__(
        self, compressor: CompressorArg = "topk", memory: MemoryArg | None = None, world_size: int | None = None
    ):
        super().__init__(compressor, memory, world_size)

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        if not isinstance(compressor, Sparsifier) or compressor.count((1,)) is None:
            return "it does not send a fixed number of values and positions"
        # positions are assigned to owners once, not at every step
        if compressor.traits.fixed_size == "by shape and step":
            return "it does not send the same number of values and positions at every step"
        if compressor.traits.fixed_size != "by shape":
            return "it does not send a fixed number of values and positions"
        return None

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        return [Leg(ALL_TO_ALL, Carries.GRADIENTS), Leg(ALL_GATHER, Carries.MEANS)]
