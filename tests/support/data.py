"""Data and checks that several test modules share."""

from statistics import NormalDist

import numpy as np

from grace.kernels import NumpyKernels

FALSE_ALARM = 1e-6
"""Chance that one statistical test fails although the property holds."""

EPSILON = float(np.finfo(np.float32).eps)
TINY = 1.5e-45  # the smallest float32, about
HUGE = float(np.finfo(np.float32).max)
REFERENCE = NumpyKernels()


def z_limit(tests: int = 1) -> float:
    """Return the magnitude that a standard normal number exceeds with probability FALSE_ALARM in any of ``tests``."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM / 2 / tests)


KINDS = ("gaussian", "heavy", "tied", "zeros", "mostly-zero", "denormal", "huge", "mixed")


def data(kind: str, shape, seed: int = 0) -> np.ndarray:
    """float32 numbers of one kind."""
    rng = np.random.default_rng(seed)
    gaussian = rng.standard_normal(shape)
    x = {
        "gaussian": lambda: gaussian,
        "heavy": lambda: rng.standard_t(2, shape),
        "tied": lambda: rng.integers(-3, 4, shape) / 4,
        "zeros": lambda: gaussian * 0,
        "mostly-zero": lambda: gaussian * (rng.random(shape) < 0.02),
        "denormal": lambda: rng.integers(-40, 41, shape) * 1.4012984643e-45,
        "huge": lambda: rng.uniform(-HUGE, HUGE, shape),
        "mixed": lambda: gaussian * 10.0 ** rng.uniform(-44, 37, shape),
    }[kind]()
    return np.asarray(x).astype(np.float32)


def same(a, b) -> None:
    """Equal shape, element type and bits."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert a.tobytes() == b.tobytes()


def agree(it, method, *args, exact=True):
    """Call a kernel and the reference; the reference's result."""
    with np.errstate(all="ignore"):
        copies = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
        expected, got = getattr(REFERENCE, method)(*copies), it.run(method, *args)
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
        for one, other in pairs:
            if isinstance(other, np.ndarray):
                assert one.dtype == other.dtype
            if exact:
                np.testing.assert_array_equal(one, other)
            else:
                np.testing.assert_allclose(one, other, rtol=3e-7, atol=TINY)
    return expected


def close(got, wanted, scale, floor=4 * TINY) -> None:
    """Within a few float32 roundings of numbers of magnitude ``scale``."""
    got, wanted = np.float64(got), np.float64(wanted)
    assert got.shape == wanted.shape
    unequal = got != wanted  # Inf minus Inf is no number
    error, scale = np.abs(np.subtract(got, wanted, where=unequal, out=np.zeros_like(got))), np.float64(scale)
    assert (error <= 4 * EPSILON * scale + floor).all()
