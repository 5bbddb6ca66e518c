"""Fits a Keras model until rank 1 ends in the middle of a step. Started by a launcher.

Usage: killed_keras.py METHOD kill|raise
"""

import os
import signal
import sys
import time

import keras
import numpy as np

import grace


def main(method: str, how: str) -> None:
    grace.init()

    class End(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 5 and grace.rank() == 1:
                print(f"killed at {time.time()}", flush=True)
                if how == "raise":
                    raise ValueError("a mistake on rank 1")
                os.kill(os.getpid(), signal.SIGKILL)

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(10)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.01), compressor=method), "mse")
    x = np.ones((80_000, 64), np.float32)
    model.fit(x, np.ones((80_000, 10), np.float32), batch_size=8, verbose=0, callbacks=[End()])


if __name__ == "__main__":
    main(*sys.argv[1:])
