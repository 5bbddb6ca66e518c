"""Compressors to try, and what they send."""

import warnings

import numpy as np

import grace
from grace.core.compressor import Compressor
from grace.core.context import Context

SPECS = [
    "none", "fp16", "qsgd", "qsgd(levels=7)", "qsgd(levels=1, bucket_size=33)", "qsgd(norm=l2, levels=64)",
    "topk", "topk(ratio=0.3)", "topk(ratio=0.05, chunk=64)", "randomk", "randomk(ratio=0.3, unbiased=true)",
    "signsgd", "efsignsgd", "powersgd", "powersgd(rank=3)", "powersgd(warm_start=false)",
]  # fmt: skip
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
