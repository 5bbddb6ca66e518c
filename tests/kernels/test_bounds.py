"""The compiled loops stay within their arrays: the kernels' tests once more, with Numba's checks of every index."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import warm
from tests.support.drawing import THOROUGH
from tests.support.limits import HANGS

CHECKED = os.environ.get("NUMBA_BOUNDSCHECK") == "1"


if CHECKED:

    def test_fused_loops_are_checked_here():
        from grace.kernels.numba.primitives import _gather

        with pytest.raises(IndexError):
            _gather(np.zeros(3, np.float32), np.int32([3]), np.empty(1, np.float32))


@pytest.mark.slow
@pytest.mark.skipif(not THOROUGH, reason="left to `make thorough`: all loops are compiled anew")
def test_no_compiled_loop_leaves_its_arrays(tmp_path):
    selected = "fused and not torch and not tensorflow"
    run = subprocess.run(
        [warm.REAL, "-m", "pytest", str(Path(__file__).parent), "-m", "not slow", "-k", selected, "-rsp"],
        env={**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},  # others' code has no checks
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "SKIPPED" not in run.stdout, run.stdout[-2000:]
    assert "::test_fused_loops_are_checked_here" in run.stdout  # else nothing was checked
