"""Trains on all ranks until a fault strikes rank 1 in its sixth step; a launcher starts it (faults/test_matrix.py).

Usage: trains.py torch|keras METHOD FAULT, or trains.py auto links|codecs|trials FAULT, which strikes while
``strategy="auto"`` measures or tries these. FAULT is what rank 1 does then:

kill, stop    it gets SIGKILL or SIGSTOP
raise         a ValueError that nobody catches
leave         training ends as if its data did, and the program ends well
skip          no optimizer.step() after its backward pass
miss          neither a backward pass nor a step

OUTER names an outer optimizer, if ranks are to train alone and exchange drifts after every fourth step. The others
wait ANSWER_SECONDS for a rank's answer, and GIVE_UP_SECONDS at least for one that has left.
"""

import os
import signal
import sys
import time

import numpy as np

import grace
from grace.core import watch, watch_server

STEP, STEPS = 5, 100_000
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def strike(fault: str) -> None:
    """The fault; returns if it is about what the caller leaves out."""
    print(f"struck at {time.time()}", flush=True)
    if fault == "raise":
        raise ValueError("a mistake on rank 1")
    if fault in SIGNALS:
        os.kill(os.getpid(), SIGNALS[fault])


def train_torch(method: str, fault: str) -> None:
    import torch

    torch.set_num_threads(1)
    grace.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rounds = {"outer": os.environ["OUTER"], "period": 4} if "OUTER" in os.environ else {}
    optimizer = grace.DistributedOptimizer(optimizer, model.named_parameters(), compressor=method, **rounds)
    for step in range(STEPS):
        struck = step == STEP and grace.rank() == 1
        optimizer.zero_grad()
        loss = model(torch.randn(8, 64)).square().mean()
        if not (struck and fault == "miss"):
            loss.backward()
        if struck:
            strike(fault)
        if struck and fault == "leave":
            return
        if not (struck and fault in ("skip", "miss")):
            optimizer.step()


def fit_keras(method: str, fault: str) -> None:
    import keras

    grace.init()
    struck_here = grace.rank() == 1

    class Strike(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == STEP and struck_here:
                strike(fault)

    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(10)])
    model.compile(grace.DistributedOptimizer(keras.optimizers.SGD(0.01), compressor=method), "mse")
    batches = STEP + 1 if struck_here and fault == "leave" else 10_000
    x = np.ones((8 * batches, 64), np.float32)
    model.fit(x, np.ones((8 * batches, 10), np.float32), batch_size=8, verbose=0, callbacks=[Strike()])


def train_auto(phase: str, fault: str) -> None:
    import torch

    from grace.planner import auto_planner

    torch.set_num_threads(1)
    grace.init()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = grace.DistributedOptimizer(optimizer, model, strategy="auto(methods=['fp16'])")
    auto_planner.LINK_SECONDS, auto_planner.CODEC_SECONDS = 0.2, 0.02

    def struck(*ignored: object, **options: object) -> None:
        strike(fault)
        sys.exit(0)

    measured = auto_planner.AutoPlanner.measure_links

    def struck_behind_links(self: auto_planner.AutoPlanner, plain: float) -> None:
        measured(self, plain)
        struck()  # while rank 0 measures codecs

    if grace.rank() == 1 and phase == "links":
        auto_planner.measure_network = struck
    elif grace.rank() == 1 and phase == "codecs":
        auto_planner.AutoPlanner.measure_links = struck_behind_links
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        auto = optimizer._grace.driver
        if grace.rank() == 1 and phase == "trials" and auto.trying and not auto.settled:
            struck()
        optimizer.step()


if __name__ == "__main__":
    watch_server.ANSWER_SECONDS = float(os.environ.get("ANSWER_SECONDS", watch_server.ANSWER_SECONDS))
    watch.GIVE_UP_SECONDS = float(os.environ.get("GIVE_UP_SECONDS", watch.GIVE_UP_SECONDS))
    {"torch": train_torch, "keras": fit_keras, "auto": train_auto}[sys.argv[1]](*sys.argv[2:])
