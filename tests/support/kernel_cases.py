"""The reference of all kernels, and the inputs on which they are compared with it."""

import pytest
from hypothesis import strategies as st

from grace.kernels import Stream
from tests.support.implementations import ALL, OTHERS

STREAMS = st.builds(Stream, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
WEIGHTS = st.sampled_from([1.0, -1.0, 0.5, 1 / 3, -0.125])
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (0, 3)]
FLOATS = ["float16", "float32", "float64"]

others = pytest.mark.parametrize("it", OTHERS)
every = pytest.mark.parametrize("it", ALL)
