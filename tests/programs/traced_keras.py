"""Trains a small network on Keras for a few steps. Started by a launcher.

Usage: traced_keras.py eager|graph
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import grace
import grace.tensorflow


def main(how: str) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    grace.init(framework="tensorflow")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = grace.tensorflow.DistributedOptimizer(keras.optimizers.SGD(0.01), compressor="topk(ratio=0.1)")
    model.compile(optimizer, "mse", run_eagerly=how == "eager", jit_compile=False)
    x = np.full((48, 16), 1.0 + grace.rank(), np.float32)
    model.fit(x, np.zeros((48, 10), np.float32), batch_size=8, verbose=0)
    if grace.rank() == 0:
        print("PAYLOAD", json.dumps(optimizer.traffic.payload_bytes), flush=True)
    grace.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
