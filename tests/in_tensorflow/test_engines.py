"""The whole catalogue on TensorFlow's tensors, over every engine: the means that torch gets over torch.distributed."""

import functools
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.core.registry import legal_communicators, make
from grace.tensorflow import representation
from tests.support.drawing import THOROUGH, drawn
from tests.support.methods import BUILTIN, EXCHANGES
from tests.support.pools import launched
from tests.support.tensorflow_training import session_of, variables_of
from tests.support.training import Given, distributed, made_up, plain_sgd

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SHAPES = {"odd": (13, 7), "kernel": (3, 2, 3, 3), "one": (1,), "scalar": (), "empty": (0, 3), "zeros": (31,)}
METHODS = (
    *(*BUILTIN, "bf16", "block(bits=4, hadamard=32)", "block(format=fp8, rounding=stochastic)"),
    *("topk(ratio=0.2) | qsgd(levels=7)", "randomk(ratio=0.2) | fp16", "dgc(ratio=0.1) | efsignsgd"),
)
STEPS = 2
MULTIPLIED = ("powersgd",)
"""Methods whose matrix products each framework rounds in its own way."""


def gradients_of(step: int) -> dict[str, np.ndarray]:
    gradients = made_up(SHAPES, step, grace.rank())
    gradients["zeros"][:] = 0
    return gradients


def with_torch(pair: tuple[str, str]) -> list[dict[str, np.ndarray]]:
    """The means of a few steps."""
    model = Given(SHAPES)
    compressor, communicator = pair
    optimizer = distributed(model, compressor, optimizer=plain_sgd, communicator=communicator)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model.backward(gradients_of(step))
        optimizer.step()
        found.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
    return found


def with_tensorflow(pair: tuple[str, str], way: str) -> list[dict[str, np.ndarray]]:
    """The same, eagerly or in a graph; "tensors" is a graph that computes as it does for a user's own compressor."""
    exchange, variables = session_of(*pair), variables_of(SHAPES)

    def step(gradients):
        return [mean.value for mean in exchange.exchange(gradients, variables, 0.05)]

    run = step if way == "eager" else tf.function(step, autograph=False)
    chosen = (lambda components: representation.Tensors()) if way == "tensors" else representation.representation_for
    means = []
    with mock.patch.object(representation, "representation_for", chosen):
        for number in range(STEPS):
            brought = run([tf.constant(g) for g in gradients_of(number).values()])
            means.append({name: np.array(mean) for name, mean in zip(SHAPES, brought, strict=True)})
    return means


def all_with_torch(pairs):
    return {pair: with_torch(pair) for pair in pairs}


def all_with_tensorflow(ways):
    return {(pair, way): with_tensorflow(pair, way) for way, pairs in ways.items() for pair in pairs}


LEGAL = [(method, name) for method in METHODS for name in legal_communicators(make("compressor", method))]
RUNS = {
    ("mpirun-mpi", 2, "eager"): drawn(LEGAL),
    ("mpirun-mpi", 2, "tensors"): EXCHANGES[::2],
    ("mpirun-mpi", 2, "graph"): EXCHANGES[::3],
    ("mpirun-mpi", 3, "eager"): EXCHANGES[::2],
    ("horovodrun-gloo", 2, "graph"): EXCHANGES[1::2],
}
if THOROUGH:  # to trace a graph takes longer than all steps, and a method computes in it as it does eagerly
    GRAPHS = [(engine, size, "graph") for engine in ("mpirun-mpi", "horovodrun-gloo") for size in (2, 3)]
    RUNS = {
        **dict.fromkeys([*RUNS, ("mpirun-horovod", 2, "eager")], EXCHANGES),
        **dict.fromkeys([*list(RUNS)[:1], *GRAPHS], LEGAL),
    }
CASES = [(*run, pair) for run, pairs in RUNS.items() for pair in pairs]
"""The engine, its ranks, how they compute and what; the last one's ranks serve the next modules too."""


@functools.cache
def expected(size):
    return launched("gloo", size).run(all_with_torch, sorted({pair for _, n, _, pair in CASES if n == size}))[0]


@functools.cache
def results_of(engine, size):
    pairs = {}
    for *run, way, pair in CASES:
        if run == [engine, size]:
            pairs.setdefault(way, []).append(pair)
    return launched(engine, size, "tensorflow").run(all_with_tensorflow, pairs)


@pytest.mark.every
@pytest.mark.parametrize(
    ("engine", "size", "way", "pair"), CASES, ids=[f"{e}-{n}-{w}-{'-'.join(p)}" for e, n, w, p in CASES]
)
def test_means_are_those_of_torch(engine, size, way, pair):
    ranks, wanted = results_of(engine, size), expected(size)
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0][pair, way], other[pair, way], strict=True):
            for name in SHAPES:
                assert mine[name].tobytes() == theirs[name].tobytes(), name
    exact = len(ranks) == 2 and not pair[0].startswith(MULTIPLIED)
    for step, (got, torchs) in enumerate(zip(ranks[0][pair, way], wanted[pair], strict=True)):
        for name in SHAPES:
            if exact:
                np.testing.assert_array_equal(got[name], torchs[name], err_msg=f"{name}, step {step}")
            else:
                tolerance = {"fp16": 1e-3, "bf16": 1e-2}.get(pair[0].split("| ")[-1], 2e-5)
                np.testing.assert_allclose(got[name], torchs[name], rtol=tolerance, atol=tolerance, err_msg=name)
