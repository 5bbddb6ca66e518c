"""Compressors to try, and what they send."""

import warnings

import numpy as np

import grace
from grace.core.compressor import Compressor
from grace.core.context import Context

BUILTIN = sorted(name for name, cls in grace.known("compressor").items() if cls.__module__.startswith("grace."))
SPECS = [
    *BUILTIN,
    "bf16", "qsgd(levels=7)", "qsgd(levels=1, bucket_size=33)", "qsgd(norm=l2, levels=64)", "terngrad(clip=0.5)",
    "sketch(quantiles=5)", "topk(ratio=0.3)", "topk(ratio=0.05, chunk=64)", "randomk(ratio=0.3, unbiased=true)",
    "threshold(value=1.5)", "dgc(ratio=0.05)", "powersgd(rank=3)", "powersgd(warm_start=false)",
    "topk(ratio=0.1) | qsgd(levels=7)", "threshold(value=1) | efsignsgd",
]  # fmt: skip
"""Grace's methods, and settings of theirs by which they compute in another way."""
EXCHANGES = [
    *(("none", "allreduce"), ("bf16", "allreduce"), ("qsgd", "scatter_reduce"), ("topk(ratio=0.1)", "allgather")),
    *(("signsgd", "broadcast"), ("powersgd(rank=2)", "allreduce"), ("threshold(value=0.5)", "allgather")),
]
"""A method and a communicator for each kind of exchange."""
SHAPES = [(), (0,), (0, 3), (1,), (7,), (64,), (1000,), (5, 3), (33, 17), (8, 3, 3, 3), (2, 1, 1), (1, 513)]


def make(spec: str, **context) -> Compressor:
    compressor = grace.make("compressor", spec)
    compressor.bind(Context(**context))
    return compressor


def communicator_of(spec: str, memory=None):
    compressor = grace.make("compressor", spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return grace.known("communicator")[compressor.traits.communicator](compressor, memory)


def decoded(compressor, x: np.ndarray) -> np.ndarray:
    return np.asarray(compressor.decompress(*compressor.compress(x, "w")))


def sent(compressor, x) -> list:
    """Every tensor that travels for x: one payload, or one per round."""
    if compressor.traits.rounds == 1:
        return compressor.compress(x, "w")[0]
    rounds, tensors = compressor.exchange(x, "w"), []
    payload = next(rounds)
    while True:
        tensors += payload
        try:
            payload = rounds.send(payload)
        except StopIteration:
            return tensors
