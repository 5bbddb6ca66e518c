"""TensorFlow's graphs call the kernels of arrays, and give what eager calls do."""

import numpy as np
import pytest

from grace.kernels import Stream
from tests.support.data import REFERENCE, data, same
from tests.support.implementations import tf

pytestmark = [pytest.mark.skipif(tf is None, reason="TensorFlow is not installed"), pytest.mark.slow]
X, Y = data("gaussian", 100, 1), data("heavy", 100, 2)
MATRIX, FACTOR = data("gaussian", (20, 3), 3), data("gaussian", (3, 5), 4)
CODES, SCALES = REFERENCE.quantize(X, 7, 32, "max", None)
PLACES, ONE = np.int32([0, 3, 98]), np.float32([0.5])
STREAM = Stream(5, 6)
CALLS = {
    "cast": (X, "float16"),
    "all_finite": (X,),
    "combine": (0.9, X, 0.5, Y),
    "add": (X, Y, 0.5),
    "divide": (X, Y, 3),
    "mean_abs": (X,),
    "signs": (MATRIX,),
    "matmul": (MATRIX, FACTOR),
    "matmul_add": (np.zeros((20, 3), np.float32), MATRIX, data("gaussian", (3, 3)), 0.5, 0.0),
    "orthogonalize": (MATRIX,),
    "fill_zero_columns": (MATRIX, MATRIX),
    "random_bits": (STREAM, 10, X),
    "uniform": (STREAM, 10, X),
    "random_indices": (STREAM, 100, 7, X),
    "sample_indices": (STREAM, 100, 7, X),
    "quantize": (X, 7, 32, "l2", STREAM),
    "dequantize": (Y, CODES, SCALES, 7, 32, 0.5),
    "pack": (CODES, 4),
    "unpack": (REFERENCE.pack(CODES, 4), 4, 100),
    "pack_signs": (X,),
    "add_signs": (X, REFERENCE.pack_signs(Y), ONE, 0.5),
    "max_abs": (X,),
    "side_means": (X,),
    "clip_deviation": (X, 1.5),
    "round_powers": (X, STREAM),
    "add_powers": (X, CODES, 0.5),
    "round_float8": (X, 32, None),
    "add_float8": (X, CODES, SCALES, 32, 0.5),
    "rotate": (X,),
    "bucketize": (X, ONE, np.sort(Y)),
    "add_table": (X, CODES, 8, data("gaussian", 256), ONE, 0.5),
    "quantile_buckets": (X, 7),
    "topk": (X, 9),
    "topk_chunks": (X, 32, 3),
    "bitmap": (PLACES, 100),
    "positions": (REFERENCE.bitmap(PLACES, 100), 100),
    "narrow": (PLACES,),
    "widen": (REFERENCE.narrow(PLACES),),
    "widen_chunks": (REFERENCE.narrow(PLACES), 32, 1),
    "above": (X, 1.0),
    "largest_above": (X, 1.0, 9),
    "kth_magnitude": (X, 9),
    "gather": (X, PLACES),
    "scatter_add": (X, PLACES, Y[:3], 0.5),
    "zero_at": (X, PLACES),
    "add_at": (X, PLACES, ONE, 0.5),
    "clip_norm": (X, 1.0),
    "one_side": (X, 1),
    "fixed_tags": (X, 0.1, 2.0, 2.0**-6, 2.0**-14),
    "where_code": (CODES, 7),
    "to_fixed": (X, 2.0**-4, "int8"),
}
"""Arguments of each kernel."""


def in_graph(function, arrays, known):
    """Call a function of tensors in a graph, which knows all dimensions of them, or none of the first ones."""
    specs = [tf.TensorSpec(a.shape if known else [None, *a.shape[1:]], a.dtype) for a in arrays]
    return tf.function(function, input_signature=specs, autograph=False)(*map(tf.constant, arrays))


def call_of(kernels, method):
    """A function of the tensors among a kernel's arguments, and a list that gets the shapes of its results."""
    args, shapes = CALLS[method], []
    places = [i for i, arg in enumerate(args) if isinstance(arg, np.ndarray)]

    def call(*tensors):
        given = list(args)
        for i, tensor in zip(places, tensors, strict=True):
            given[i] = tensor
        result = getattr(kernels, method)(*given)
        shapes[:] = [getattr(one, "shape", None) for one in tf.nest.flatten(result)]
        return result

    return call, [args[i] for i in places], shapes


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_graphs_give_what_eager_calls_do(known):
    from grace.kernels.tensorflow.primitives import RESULTS, TensorFlowKernels

    assert set(CALLS) == set(RESULTS)
    for method in CALLS:
        call, arrays, shapes = call_of(TensorFlowKernels(compiled=True), method)
        wanted = tf.nest.flatten(call(*map(tf.constant, arrays)))
        results = tf.nest.flatten(in_graph(call, arrays, known))
        for one, other, traced in zip(results, wanted, shapes, strict=True):
            if not tf.is_tensor(other):  # a number of the host, which a graph has in a tensor
                assert np.asarray(one) == other
                continue
            same(one, other)
            assert traced.is_compatible_with(other.shape), method
            if known and method not in ("above", "where_code", "positions"):
                assert traced == other.shape, method


def test_a_step_in_a_tensor_and_a_threshold_of_the_graph_are_read_when_it_runs():
    from grace.kernels.tensorflow.primitives import TensorFlowKernels

    kernels = TensorFlowKernels(compiled=True)

    def call(x, step):
        return kernels.uniform(Stream(5, step), 10, x), kernels.above(x, kernels.kth_magnitude(x, 9))

    numbers, places = in_graph(call, [X, np.array(6)], True)
    same(numbers, REFERENCE.uniform(STREAM, 10))
    same(places, REFERENCE.above(X, REFERENCE.kth_magnitude(X, 9)))


def test_damaged_payloads_are_refused_when_a_graph_runs():
    from grace.kernels.tensorflow.primitives import TensorFlowKernels

    kernels = TensorFlowKernels(compiled=True)
    with pytest.raises(tf.errors.OpError, match=r"PayloadError: position 100 is not in \[0, 100\)"):
        in_graph(kernels.zero_at, [X, np.int32([3, 100])], False)
    with pytest.raises(tf.errors.OpError, match="PayloadError: 2 bytes of codes, where there must be 13"):
        in_graph(lambda packed: kernels.unpack(packed, 1, 100), [np.zeros(2, np.uint8)], False)
