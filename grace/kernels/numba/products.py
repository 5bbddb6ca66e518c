"""Products of matrices with narrow ones, as low-rank methods take them: as compiled loops that read the wide one once.

A narrow matrix is padded with zeros to a multiple of 4 columns, which are taken 4 at a time; so every matrix has one
loop, and the time is that of the memory. Sums over rows and columns are reassociated; ``a b^T`` is rounded after every
operation, in the order of the columns, whatever is done with it, so that a residual of up to 4 columns has the bits of
x - a b^T.
"""

import numpy as np

from grace.kernels.numba.compiling import loop
from grace.kernels.numba.loops import compiled, f32

multiplying = loop(fastmath={"reassoc", "contract", "nsz"})

COLUMNS = 1024
"""Columns of the wide matrix read at a time: with 4 of the narrow one's columns they stay in the nearest cache."""


@compiled
def _columns(narrow, weight):
    """Return the columns of a narrow matrix times a weight, as rows, and rows of zeros behind them."""
    rows, width = narrow.shape
    out = np.zeros(((width + 3) // 4 * 4, rows), f32)
    for i in range(rows):
        for k in range(width):
            out[k, i] = weight * narrow[i, k]
    return out


@multiplying
def _product(x, factor, out):
    rows, width = out.shape
    columns = _columns(factor, f32(1))
    sums = np.empty((2, 4), f32)
    for i in range(0, rows, 2):
        # Of an odd number of rows the last one is computed twice, and written once.
        x0, x1 = x[i], x[min(i + 1, rows - 1)]
        for k in range(0, width, 4):
            c0, c1, c2, c3 = columns[k], columns[k + 1], columns[k + 2], columns[k + 3]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = f32(0)
            for j in range(x0.size):
                a, b = x0[j], x1[j]
                a0 += a * c0[j]
                a1 += a * c1[j]
                a2 += a * c2[j]
                a3 += a * c3[j]
                b0 += b * c0[j]
                b1 += b * c1[j]
                b2 += b * c2[j]
                b3 += b * c3[j]
            sums[0, 0], sums[0, 1], sums[0, 2], sums[0, 3] = a0, a1, a2, a3
            sums[1, 0], sums[1, 1], sums[1, 2], sums[1, 3] = b0, b1, b2, b3
            for row in range(min(2, rows - i)):
                for column in range(min(4, width - k)):
                    out[i + row, k + column] = sums[row, column]


@multiplying
def _transposed_product(x, factor, out):
    rows, width = factor.shape
    columns = _columns(factor, f32(1))
    total = np.zeros((columns.shape[0], out.shape[0]), f32)
    for start in range(0, out.shape[0], COLUMNS):
        stop = min(start + COLUMNS, out.shape[0])
        for i in range(0, rows - rows % 4, 4):
            x0, x1, x2, x3 = (
                x[i, start:stop], x[i + 1, start:stop], x[i + 2, start:stop], x[i + 3, start:stop]
            )  # fmt: skip
            for k in range(0, width, 4):
                t0, t1 = total[k, start:stop], total[k + 1, start:stop]
                t2, t3 = total[k + 2, start:stop], total[k + 3, start:stop]
                a0, a1, a2, a3 = columns[k, i], columns[k, i + 1], columns[k, i + 2], columns[k, i + 3]
                b0, b1, b2, b3 = columns[k + 1, i], columns[k + 1, i + 1], columns[k + 1, i + 2], columns[k + 1, i + 3]
                c0, c1, c2, c3 = columns[k + 2, i], columns[k + 2, i + 1], columns[k + 2, i + 2], columns[k + 2, i + 3]
                d0, d1, d2, d3 = columns[k + 3, i], columns[k + 3, i + 1], columns[k + 3, i + 2], columns[k + 3, i + 3]
                for j in range(stop - start):
                    a, b, c, d = x0[j], x1[j], x2[j], x3[j]
                    t0[j] += a * a0 + b * a1 + c * a2 + d * a3
                    t1[j] += a * b0 + b * b1 + c * b2 + d * b3
                    t2[j] += a * c0 + b * c1 + c * c2 + d * c3
                    t3[j] += a * d0 + b * d1 + c * d2 + d * d3
        for i in range(rows - rows % 4, rows):
            x0 = x[i, start:stop]
            for k in range(width):
                t0, a0 = total[k, start:stop], columns[k, i]
                for j in range(stop - start):
                    t0[j] += x0[j] * a0
    for j in range(out.shape[0]):
        for k in range(width):
            out[j, k] = total[k, j]


@compiled
def _add_product(out, left, right, weight, keep):
    rows = out.shape[0]
    a, b = _columns(left, weight), _columns(right, f32(1))
    for start in range(0, out.shape[1], COLUMNS):
        stop = min(start + COLUMNS, out.shape[1])
        for i in range(rows):
            to = out[i, start:stop]
            for k in range(0, a.shape[0], 4):
                b0, b1, b2, b3 = b[k, start:stop], b[k + 1, start:stop], b[k + 2, start:stop], b[k + 3, start:stop]
                a0, a1, a2, a3 = a[k, i], a[k + 1, i], a[k + 2, i], a[k + 3, i]
                # The first four columns meet the old elements; further ones add to theirs.
                if k > 0:
                    for j in range(stop - start):
                        to[j] += a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
                elif keep == 0:
                    for j in range(stop - start):
                        to[j] = a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]
                else:
                    for j in range(stop - start):
                        to[j] = keep * to[j] + (a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j])


@compiled
def _columns_in_range(x, largest):
    most = np.zeros(x.shape[1], f32)
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            if not abs(x[i, k]) <= largest:  # NaN is not
                return False
            most[k] = max(most[k], abs(x[i, k]))
    return most.all()


@compiled
def _products(x, factor, out, transpose):
    for i in range(x.shape[0]):
        if transpose:
            _transposed_product(x[i], factor[i], out[i])
        else:
            _product(x[i], factor[i], out[i])
