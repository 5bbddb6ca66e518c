"""Loops of the sparsifiers: sampling, scattering, and fixed-point tags."""

import numpy as np

from grace.kernels.fused.loops import SHIFT32, compiled, f32, f64, i32, u8, u64


@compiled
def _sample_indices(bits, n, out):
    k = u64(out.size)
    for j in range(out.size):
        start, stop = u64(j) * u64(n) // k, u64(j + 1) * u64(n) // k
        out[j] = i32(start + ((stop - start) * u64(bits[j]) >> SHIFT32))


@compiled
def _zero_at(out, indices):
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        out[u64(index)] = 0
    return indices.size


@compiled
def _add_at(out, indices, amount):
    for i in range(indices.size):
        index = indices[i]
        if index < 0 or index >= out.size:
            return i
        out[u64(index)] += amount
    return indices.size


@compiled
def _scaled(x, factor, out):
    for i in range(x.size):
        out[i] = f32(f64(x[i]) * factor)


@compiled
def _one_side(x, sign, out):
    count = 0
    for i in range(x.size):
        value = sign * x[i]
        positive = value > 0
        out[i] = value if positive else f32(0)
        count += positive
    return count


@compiled
def _fixed_tags(x, bound, top, per8, per16, out):
    for i in range(x.size):
        magnitude = abs(x[i])
        tag = u8(3)
        if magnitude <= top:
            if np.rint(magnitude * per16) <= f32(32767):
                tag = u8(2)
            if np.rint(magnitude * per8) <= f32(127):
                tag = u8(1)
        out[i] = u8(0) if magnitude <= bound else tag


@compiled
def _where_code(codes, code, out):
    count = 0
    for i in range(codes.size):
        out[count] = i  # overwritten by the next one unless it counts, which costs less than a branch
        count += codes[i] == code
    return count
