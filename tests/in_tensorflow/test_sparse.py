"""tf.IndexedSlices: exchanged by rows with compressed values, or made dense; the mean is the mean."""

import numpy as np
import pytest
import tensorflow as tf

import grace
from grace.communicators import Allgather
from grace.communicators.sparse import row_communicator
from grace.core.variable import Variable
from grace.exchange.bucket import Bucket, Contribution, Traffic
from grace.exchange.round_trip import RoundTrip
from grace.exchange.sparse_codec import unfit
from grace.exchange.sparse_rows import NOTHING, SparseRows
from grace.session.settings import Settings
from grace.strategy.choices import Choices
from grace.tensorflow.step_session import StepSession
from tests.support.tensorflow_training import both_ways, on_both, session_of, state_of

ROWS, WIDTH = 12, 3


def slices(step, rank):
    """A rank's sparse gradient of a step: some rows come twice, and rank 1 has none in the third step."""
    generator = np.random.default_rng((step, rank))
    count = 0 if (step, rank) == (2, 1) else 4 + 3 * rank
    rows = generator.integers(ROWS, size=count)
    values = generator.standard_normal((count, WIDTH)).astype(np.float32)
    return tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([ROWS, WIDTH]))


def dense(gradient):
    total = np.zeros((ROWS, WIDTH), np.float32)
    np.add.at(total, np.array(gradient.indices), np.array(gradient.values))
    return total


def run(compressor, graph, steps=4, **options):
    """The means of a few steps, the rows that they name, and what the memory kept."""
    exchange = session_of(compressor, **options)
    variables = [tf.Variable(tf.zeros([ROWS, WIDTH])), tf.Variable(tf.zeros([5]))]

    def step(values, rows, shape):
        return [m.value for m in exchange.exchange([tf.IndexedSlices(values, rows, shape), tf.ones([5])], variables)]

    signature = [tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64), tf.TensorSpec([2], tf.int32)]
    call = tf.function(step, input_signature=signature, autograph=False) if graph else step
    means, kept = [], []
    for number in range(steps):
        gradient = slices(number, grace.rank())
        mean, beside = call(gradient.values, gradient.indices, gradient.dense_shape)
        assert compressor != "none" or np.array(beside).tolist() == [1.0] * 5
        rows = np.array(mean.indices).tolist() if isinstance(mean, tf.IndexedSlices) else None
        means.append((np.array(tf.convert_to_tensor(mean)), rows))
        kept.append(state_of(exchange).get("memory", {}).get("Variable"))
    return means, kept, exchange.traffic.sent_bytes


def mean_of(step):
    return (dense(slices(step, 0)) + dense(slices(step, 1))) / 2


@both_ways
@on_both
def test_uncompressed_rows_give_the_mean(graph):
    means, _, sent = run("none", graph)
    for step, (mean, rows) in enumerate(means):
        np.testing.assert_allclose(mean, mean_of(step), atol=1e-6)
        assert rows == sorted(set(np.nonzero(mean_of(step).any(1))[0].tolist()))
    assert 0 < sent < 4 * 8 * (ROWS * WIDTH + 5)


@both_ways
@pytest.mark.parametrize(
    "compressor", ["qsgd", "fp16", "topk(ratio=0.4)", "topk(ratio=0.4) | qsgd", "onebit", "natural"]
)
@on_both
def test_ranks_agree_and_what_is_left_out_is_kept_by_rows(compressor, graph):
    """Sent + what is kept now = gradient + what was kept before, summed over ranks."""
    means, kept, _ = run(compressor, graph)
    before = np.zeros((ROWS, WIDTH), np.float32)
    for step, ranks in enumerate(zip(*grace.allgather_object(kept), strict=True)):
        if ranks[0] is not None:
            np.testing.assert_allclose(2 * means[step][0] + sum(ranks), 2 * mean_of(step) + before, atol=2e-5)
            before = sum(ranks)
    return [(mean.tobytes(), rows) for mean, rows in means]


@on_both
def test_eager_and_graph_are_the_same():
    eager, graph = (run("topk(ratio=0.4)", way)[0] for way in (False, True))
    for (mean, _), (other, _) in zip(eager, graph, strict=True):
        assert mean.tobytes() == other.tobytes()


@on_both
def test_made_dense_when_asked():
    for step, (mean, rows) in enumerate(run("none", False, sparse_as_dense=True)[0]):
        assert rows is None
        np.testing.assert_allclose(mean, mean_of(step), atol=1e-6)


@pytest.mark.parametrize(
    ("compressor", "memory", "why"),
    [
        ("powersgd", None, "in several rounds"),
        ("signsgd", None, "votes element by element"),
        ("signum", None, "keeps something of the whole variable|votes"),
        ("dgc", None, "the memory dgc is one of whole variables"),
        ("efsignsgd", None, "the memory efsignsgd is one of whole variables"),
    ],
)
def test_what_cannot_serve_rows_is_refused_by_name(compressor, memory, why):
    exchange = StepSession(Choices(compressor, memory, None), grace.init("local"), Settings())
    with pytest.raises(grace.ConfigError, match=f"'Variable' is sparse, and .*({why}).* sparse_as_dense=True"):
        exchange.exchange([slices(0, 0)], [tf.Variable(tf.zeros([ROWS, WIDTH]))])


@pytest.mark.slow
def test_every_method_serves_rows_or_says_why_not():
    for name in grace.known("compressor"):
        parameters = "(value=0.1)" if name == "threshold" else ""
        chosen = grace.make("compressor", name + parameters)
        memory = grace.make("memory", chosen.traits.memory)
        if unfit(chosen, memory):
            continue
        communicator = row_communicator(Allgather(chosen, memory), "emb")
        assert communicator.step is not None
        rows = tf.constant([5, NOTHING + 1, 5], tf.int64)
        bucket = Bucket(0, communicator, [Variable("emb", (ROWS, WIDTH), sparse=True)])
        exchange = RoundTrip(Contribution(bucket, [SparseRows(tf.ones([3, WIDTH]), rows)], [True], True, Traffic()))
        exchange.start()
        while exchange.advance():
            pass
        (outcome,) = exchange.finish([None])
        assert np.array(outcome.value.rows).tolist() == [0, 5], name
        assert np.array(outcome.value.values).shape == (2, WIDTH)
