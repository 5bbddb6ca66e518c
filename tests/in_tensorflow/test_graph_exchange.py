"""Means are the same however a graph's exchange is made: by sums that never enter Python, or by buckets that share
their functions."""

import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.session.settings import ReduceOp
from grace.tensorflow import graph_exchange
from tests.support.tensorflow_training import digest, on_horovod, session_of, variables_of

SHAPES = {"matrix": (30, 40), "vector": (700,), "scalar": (), "empty": (0, 3), "tiny": (1,), "idle": (5,)}


def steps(session, variables, count=3):
    """Exchange some steps in a graph: ``idle`` has a gradient nowhere, ``tiny`` on rank 0 only."""
    brought = []

    @tf.function(autograph=False)
    def exchange(gradients):
        return [(mean.value, mean.found) for mean in session.exchange([*gradients, None], variables)]

    generator = np.random.default_rng(grace.rank())
    for _ in range(count):
        gradients = [tf.cast(generator.standard_normal(v.shape), v.dtype) for v in variables[:-1]]
        if grace.rank():
            gradients[SHAPES_WITHOUT_IDLE.index("tiny")] = None
        brought += exchange(gradients)
    return [tf.cast(value, tf.float64) for value, _ in brought], [bool(found) for _, found in brought]


SHAPES_WITHOUT_IDLE = [name for name in SHAPES if name != "idle"]


def both(compressor, dtype, apart, options):
    """Means, flags and traffic, as they are now, and with ``apart`` instead of what the graph does."""
    options = {"reduction": ReduceOp(**options.pop("reduction", {})), **options}
    answers, names = [], [name for name in apart if hasattr(graph_exchange, name)]
    assert names == list(apart)
    for replaced in ((), names):
        before = {name: getattr(graph_exchange, name) for name in replaced}
        for name in replaced:
            setattr(graph_exchange, name, APART[name])
        variables = variables_of(SHAPES, dtype)
        session = session_of(compressor, **options)
        values, found = steps(session, variables)
        traffic = session.traffic
        answers.append((digest(values), found, traffic.payload_bytes, traffic.steps, session.context.step))
        for name, value in before.items():
            setattr(graph_exchange, name, value)
        assert len(session.runner.buckets) > 1 or not options.get("bucket_bytes")
        session.close()
    return answers


APART = {"all_sums": lambda runner: False, "grouped": lambda buckets: [[bucket] for bucket in buckets]}


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"bucket_bytes": 1000}),
        ("float64", {"reduction": {"op": "sum"}}),
        ("float16", {"reduction": {"predivide": 0.3}}),
        ("bfloat16", {}),
    ],
    ids=str,
)
@on_horovod
def test_sums_that_never_enter_python_are_those_that_do(dtype, options):
    (bits, found, *counted), (other, as_found, *as_counted) = both("none", dtype, ["all_sums"], options)
    assert (bits, found, counted) == (other, as_found, as_counted)
    assert found == [True, True, True, True, True, False] * 3


@pytest.mark.parametrize("compressor", ["topk(ratio=0.1)", "powersgd(rank=2)", "threshold(value=0.5)"])
@on_horovod
def test_buckets_that_share_their_functions_bring_what_they_bring_apart(compressor):
    one, other = both(compressor, "float32", ["grouped"], {"bucket_bytes": 300})
    assert one == other


@on_horovod
def test_what_a_checkpoint_owes_is_applied_once_and_not_by_a_step_that_overflows():
    """A sum goes on from a checkpoint of a run that still had a mean to apply."""
    variables = variables_of({"a": (3,), "b": (2,)})
    session = session_of("none")

    @tf.function(autograph=False)
    def exchange(gradients):
        return [(mean.value, mean.found) for mean in session.exchange([*gradients, None], variables)]

    ones = [tf.ones(3)]
    exchange(ones)
    session.runner.restore_pending_means([{"a": np.float32([1, 2, 3]), "b": np.float32([4, 5])}])
    overflow = [tf.constant([1.0, np.inf if grace.rank() else 1.0, 1.0])]
    assert not np.isfinite(exchange(overflow)[0][0]).all()
    first, second = ([(np.asarray(value).tolist(), bool(found)) for value, found in exchange(ones)] for _ in range(2))
    assert first == [([2.0, 3.0, 4.0], True), ([4.0, 5.0], True)]
    assert second == [([1.0, 1.0, 1.0], True), ([0.0, 0.0], False)]
