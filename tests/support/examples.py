"""Strategies of hypothesis for several test modules."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.support.data import HUGE, KINDS, data


def examples(number: int) -> settings:
    """For ``@given``: so many examples in ``make test``, where others have 20, and fewer in ``make check``."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 20))


EXTREMES = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, -1e-38, 1.0, -1.0, 0.5, HUGE, -HUGE]
NUMBERS = st.one_of(
    st.sampled_from(EXTREMES).map(lambda value: float(np.float32(value))),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)
VECTORS = st.one_of(
    arrays(np.float32, st.integers(0, 40), elements=NUMBERS),
    st.builds(data, st.sampled_from(KINDS), st.integers(0, 3000), st.integers(0, 2**32 - 1)),
)
"""1-d float32: empty, odd, zero, denormal, huge, tied."""
