"""Costs of TensorFlow's exchange beside Horovod's own all-reduce: step times side by side, in one run.

    horovodrun -np 2 python -m benchmarks.tensorflow_overhead

Every side trains the same network on the same data in a ``tf.function``; "alone" exchanges nothing. Steps alternate,
so that other work of the machine disturbs all alike; the ratio is that of the medians to Horovod's.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import grace

NETWORKS = {"demo's network": (64, 256, 256, 10), "8.4 M parameters": (*[1024] * 9, 10)}


def stepper(kind: str, widths: tuple[int, ...]) -> Callable[[], Any]:
    """Return a function that makes one training step: "alone", "horovod", or with a compressor."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, "relu") for width in widths[1:-1]]
    model = keras.Sequential([keras.layers.Input(widths[:1]), *layers, keras.layers.Dense(widths[-1])])
    optimizer = keras.optimizers.SGD(0.01)
    if kind not in ("alone", "horovod"):
        optimizer = grace.DistributedOptimizer(optimizer, compressor=kind)
    x, y = tf.random.normal([16, widths[0]]), tf.zeros([16], tf.int32)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        if kind == "horovod":
            gradients = [hvd.allreduce(gradient, op=hvd.Average) for gradient in gradients]
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def main() -> None:
    """Print one line per network: median milliseconds of each side, and their ratio to Horovod's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressors", nargs="*", default=["none", "topk", "qsgd", "powersgd(rank=4)"])
    parser.add_argument("--rounds", type=int, default=30, help="steps per side")
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    grace.init("horovod", framework="tensorflow")
    kinds = ["alone", "horovod", *options.compressors]
    for name, widths in NETWORKS.items():
        run = {kind: stepper(kind, widths) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(options.rounds + 3):
            for kind in kinds:
                began = time.perf_counter()
                run[kind]()
                if number >= 3:  # the first ones trace and warm up
                    times[kind].append(time.perf_counter() - began)
        medians = {kind: statistics.median(values) * 1e3 for kind, values in times.items()}
        if grace.rank() == 0:
            cells = ", ".join(f"{kind} {ms:.2f} ms ({ms / medians['horovod']:.2f}x)" for kind, ms in medians.items())
            print(f"{name}, {grace.size()} ranks: {cells}", flush=True)


if __name__ == "__main__":
    main()
