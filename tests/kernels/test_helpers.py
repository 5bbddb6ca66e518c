"""The public helpers are one function for all frameworks, with NumPy's results; what they cannot take is refused."""

import numpy as np
import pytest

from grace.errors import ConfigError, PayloadError
from grace.kernels import Stream, dequantize, desparsify, pack, quantize, sparsify, unpack
from tests.support.implementations import ALL, crossed, tf

SHAPES = [(), (0,), (7,), (3, 5), (2, 600)]


def there_and_back(x, shape, count):
    """Return the results of each helper for a tensor."""
    codes, scales = quantize(x, 3, Stream(5, 2), bucket_size=64, norm="max")
    packed = pack(codes, 3)
    unpacked = unpack(packed, 3, int(np.prod(shape)))
    values, indices = sparsify(x, count)
    sent = codes, scales, packed, values, indices
    return *sent, unpacked, dequantize(unpacked, scales, 3, shape, bucket_size=64), desparsify(values, indices, shape)


@crossed(ALL, ("shape",), SHAPES)
def test_results_are_numpys_in_every_framework(it, shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    count = (x.size + 2) // 3
    wanted = there_and_back(x, shape, count)
    found = [it.back(part) for part in there_and_back(it.to(x), shape, count)]
    for expected, got in zip(wanted, found, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    codes, scales, _, _, _, unpacked, dense, sparse = wanted
    np.testing.assert_array_equal(unpacked, codes)
    steps = np.repeat(scales, 64)[: x.size].reshape(shape) / 3
    assert (np.abs(dense - x) <= steps * 1.00001).all()
    kept = np.sort(np.abs(x), axis=None)[::-1][:count]
    np.testing.assert_array_equal(np.sort(np.abs(sparse), axis=None)[::-1][:count], kept)
    assert np.count_nonzero(sparse) == count


@pytest.mark.skipif(tf is None, reason="TensorFlow is not installed")
def test_graphs_give_what_eager_calls_do():
    x = np.random.default_rng(1).normal(size=(4, 50)).astype(np.float32)
    wanted = there_and_back(x, (4, 50), 20)
    graph = tf.function(lambda x: there_and_back(x, (4, 50), 20), autograph=False)
    for expected, got in zip(wanted, graph(tf.constant(x)), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("implementation", ALL)
def test_payloads_of_any_shape_are_read_in_order(implementation):
    to, back = implementation.to, implementation.back
    codes = to(np.uint8([[0, 1], [2, 6]]))
    scales = to(np.float32([[2], [3]]))
    dense = dequantize(codes, scales, 3, (2, 2), bucket_size=2)
    np.testing.assert_allclose(back(dense), [[-2, -4 / 3], [-1, 3]], rtol=1e-6)
    packed = to(back(pack(codes, 4)).reshape(2, 1))
    assert back(unpack(packed, 4, 4)).tolist() == [0, 1, 2, 6]
    sparse = desparsify(to(np.float32([[4], [5]])), to(np.int32([[3], [1]])), (2, 2))
    assert back(sparse).tolist() == [[0, 5], [0, 4]]


X, CODES = np.ones(8, np.float32), np.zeros(8, np.uint8)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: quantize(X, 128, Stream(0)), ConfigError, "levels must be a whole number, 1 to 127, not 128"),
        (lambda: quantize(X, 3, Stream(0), bucket_size=0), ConfigError, "bucket_size must be .* at least 1, not 0"),
        (lambda: quantize(X, 3, Stream(0), norm="l1"), ConfigError, "norm must be one of 'l2', 'max', not 'l1'"),
        (lambda: quantize(CODES, 3, Stream(0)), ConfigError, "dtype uint8"),
        (lambda: dequantize(CODES, X[:2], 3, (8,)), PayloadError, "2 scales, where there must be 1"),
        (lambda: dequantize(CODES, X[:1], 3, (9,)), PayloadError, "8 codes, where there must be 9"),
        (lambda: dequantize(X, X[:1], 3, (8,)), ConfigError, "codes must be of dtype uint8, not float32"),
        (lambda: pack(CODES, 9), ConfigError, "bits must be a whole number, 1 to 8, not 9"),
        (lambda: pack(X, 2), ConfigError, "codes must be of dtype uint8"),
        (lambda: unpack(CODES, 2, 33), PayloadError, "8 bytes of codes, where there must be 9"),
        (lambda: sparsify(X, 9), ConfigError, "count must be a whole number, 0 to 8, not 9"),
        (lambda: sparsify(X, 0.5), ConfigError, "count must be a whole number"),
        (lambda: desparsify(X[:2], np.int32([1]), (8,)), PayloadError, "2 values, where there must be 1"),
        (lambda: desparsify(X[:1], np.int32([8]), (8,)), PayloadError, r"8 is not in \[0, 8\)"),
        (lambda: desparsify(X[:1], np.int64([1]), (8,)), ConfigError, "indices must be of dtype int32, not int64"),
        (lambda: desparsify(X[:2], np.array(1, np.int32), (8,)), PayloadError, "2 values, where there must be 1"),
        (lambda: sparsify([1.0], 1), TypeError, "no kernels for builtins.list"),
    ],
)
def test_what_cannot_be_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
