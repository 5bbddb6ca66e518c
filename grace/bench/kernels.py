"""What encoding and decoding cost: multiples of the time of one ``copy_`` of the same tensor, in one run.

    python -m grace.bench.kernels --elements 25000000

The floor is memory traffic: a ``copy_`` reads and writes every element once. Encoding reads it at least once; decoding
a dense result writes it once.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import grace
from grace.torch.kernels import kernels_of_tensor

METHODS = (
    "fp16", "qsgd", "qsgd(levels=7)", "qsgd(levels=1)", "topk", "randomk", "signsgd", "efsignsgd", "powersgd(rank=4)",
)  # fmt: skip


def median_ms(function, repeats: int) -> float:
    """Median time of a call, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print a table: bits on the wire, encode, decode and residual update per method, in copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    side = int(options.elements**0.5)
    x = torch.randn(side, side)
    out = torch.empty_like(x)
    copy = median_ms(lambda: out.copy_(x), options.repeats)
    print(f"{x.numel():,} float32, {kernels_of_tensor(x).name} kernels; copy_ takes {copy:.1f} ms")
    print(f"{'method':20} {'bits':>6} {'encode':>7} {'decode+add':>10} {'residual':>8}   (in copies)")
    for spec in options.methods:
        compressor = grace.make("compressor", spec)
        payload, ctx = compressor.compress(x, "x")
        bits = 8 * sum(tensor.nbytes for tensor in payload) / x.numel()
        encode = median_ms(lambda c=compressor: c.compress(x, "x"), options.repeats)
        decode = median_ms(lambda c=compressor, p=payload, t=ctx: c.accumulate(p, t, out, 0.5), options.repeats)
        memory = grace.make("memory", "residual")

        def feed_back(c=compressor, m=memory, p=payload, t=ctx) -> None:
            m.update(m.compensate(x, "x"), "x", c, p, t)
            m.state.commit()

        residual = median_ms(feed_back, options.repeats)
        print(f"{spec:20} {bits:6.2f} {encode / copy:6.1f}x {decode / copy:9.1f}x {residual / copy:7.1f}x", flush=True)


if __name__ == "__main__":
    main()
