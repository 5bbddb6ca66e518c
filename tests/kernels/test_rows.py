"""The primitives of sparse gradients: every implementation equals the NumPy reference."""

import numpy as np
import pytest

from tests.support.data import REFERENCE, agree
from tests.support.implementations import ALL, OTHERS, crossed

SHAPES = [(5,), (5, 3), (5, 2, 2)]


def matrix(shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@crossed(OTHERS, ("shape", "rows"), SHAPES, [[], [4], [3, 0, 4]])
def test_rows_are_taken_and_put(it, shape, rows):
    rows = np.array(rows, np.int32)
    taken = agree(it, "take_rows", matrix(shape), rows)
    put = agree(it, "put_rows", matrix(shape), rows, 2 * taken)
    np.testing.assert_array_equal(put[rows], 2 * taken)


@crossed(OTHERS, ("shape", "rows"), SHAPES, [[], [4], [3, 0, 3]])
def test_rows_are_added_twice_if_they_come_twice(it, shape, rows):
    rows = np.array(rows, np.int32)
    values = matrix((len(rows), *shape[1:]))
    added = agree(it, "add_rows", matrix(shape), rows, values, -0.5, exact=False)
    expected = matrix(shape)
    for row, value in zip(rows, values, strict=True):
        expected[row] -= value / 2
    np.testing.assert_allclose(added, expected, rtol=1e-6)


@crossed(ALL, ("rows",), [[], [7], [5, -1, 5, 2]])
def test_distinct_rows_ascend_and_every_row_has_its_place(it, rows):
    rows = np.array(rows, np.int64)
    distinct, places = it.run("distinct", rows)
    assert distinct.tolist() == sorted(set(rows.tolist()))
    np.testing.assert_array_equal(distinct[places], rows)


@crossed(ALL, ("dtype",), ["float32", "float16", "int32", "uint8"])
def test_memory_that_an_engine_wrote_becomes_a_tensor(it, dtype):
    values = np.arange(24).astype(dtype)
    buffer = it.kernels.host_buffer(values.nbytes)
    assert (buffer.dtype, buffer.shape) == (np.uint8, (values.nbytes,))
    buffer[...] = values.view(np.uint8)
    made = it.kernels.adopt(buffer, dtype, (4, 6), it.to(values))
    np.testing.assert_array_equal(it.back(made), values.reshape(4, 6))
    assert it.kernels.dtype(made) == dtype


def test_the_reference_changes_out():
    out = np.zeros((3, 2), np.float32)
    assert REFERENCE.add_rows(out, np.array([1]), np.ones((1, 2), np.float32), 2.0) is out
    assert REFERENCE.put_rows(out, np.array([0]), np.ones((1, 2), np.float32)) is out
    assert out.tolist() == [[1, 1], [2, 2], [0, 0]]


@pytest.mark.parametrize("it", ALL)
def test_a_single_number_combines_with_every_element(it):
    x = matrix((5, 3)).reshape(-1)
    result = it.run("combine", 2.0, x, -1.0, np.float32([1.0]))
    np.testing.assert_array_equal(result, 2 * x - 1)
