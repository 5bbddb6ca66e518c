"""Sizes from which TensorFlow's tensors are better off with the compiled kernels: times of both, in one run.

    python -m benchmarks.tensorflow_threshold

Compressing with the method's default parameters, eagerly and in a graph, where reaching them costs a
``tf.numpy_function``; ratios above 1 mean that the compiled kernels are faster.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import grace
from grace.kernels.tensorflow import fused

METHODS = ("qsgd", "topk", "signsgd")


def median_us(function: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, after two that warm up."""
    times = []
    for number in range(repeats + 2):
        began = time.perf_counter()
        function()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def compressing(spec: str, n: int, compiled: bool, graph: bool) -> Callable[[], Any]:
    """A function that compresses n elements one way."""
    fused._USE_FUSED, fused.GRAPH_MINIMUM = compiled, 0
    compressor, x = grace.make("compressor", spec), tf.random.normal([n])

    def eager() -> Any:
        fused._USE_FUSED = compiled
        return compressor.compress(x, "x")[0]

    if not graph:
        return eager
    traced = tf.function(lambda tensor: compressor.compress(tensor, "x")[0], autograph=False)
    traced(x)  # while the choice holds
    return lambda: traced(x)


def main() -> None:
    """Print a table: per size and way, the times of plain and compiled kernels and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1 << power for power in (6, 10, 12, 14, 16, 20)])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    minimum = fused.GRAPH_MINIMUM
    print(f"graphs reach for the compiled kernels from {minimum:,} elements on")
    print(f"{'method':10} {'elements':>10} {'way':6} {'plain':>10} {'compiled':>10} {'ratio':>6}")
    for spec in options.methods:
        for n in options.sizes:
            for way in ("eager", "graph"):
                plain, compiled = (
                    median_us(compressing(spec, n, choice, way == "graph"), options.repeats) for choice in (False, True)
                )
                row = f"{spec:10} {n:10,} {way:6} {plain:7.0f} us {compiled:7.0f} us {plain / compiled:5.1f}x"
                print(row, flush=True)


if __name__ == "__main__":
    main()
