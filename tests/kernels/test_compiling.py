"""What was compiled is kept, until some loop is written otherwise."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import grace
from tests.support import warm

pytest.importorskip("numba", reason="compiled loops are Numba's")

PROGRAM = """
import numpy as np
from grace.kernels.fused.compiling import Listener, event
from grace.kernels.fused.rounding import MAX, _scale
compiled = []
event.register("numba:compile", Listener(compiled.append))
print(_scale(np.float32([1, -3, 2]), MAX, 1.0), "_scale" in compiled)
"""


READ_ONLY = """
import tempfile


def refuse(*args, **options):
    raise OSError(30, "Read-only file system")


tempfile.TemporaryFile = refuse  # by which Numba tries whether a folder can be written to
"""


@pytest.mark.ranks
def test_a_loop_is_compiled_again_when_one_that_it_calls_is_another(tmp_path):
    shutil.copytree(Path(grace.__file__).parent, tmp_path / "grace", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    warned = []

    def said(before=""):
        command = [warm.REAL, "-c", before + PROGRAM]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        warned.append(done.stderr.count("set NUMBA_CACHE_DIR to a folder that can be written to"))
        return done.stdout.split()

    assert [said(), said()] == [["3.0", "True"], ["3.0", "False"]]
    assert said(READ_ONLY) == ["3.0", "False"]  # as in a container whose image was built with what was compiled
    assert warned == [0] * 3
    for file in (tmp_path / "cache").rglob("*.nbi"):
        file.write_bytes(file.read_bytes()[:9])  # what is damaged is compiled anew
    assert said(READ_ONLY) == ["3.0", "True"]
    assert warned.pop() == 1
    loops = tmp_path / "grace" / "kernels" / "fused" / "loops.py"
    loops.write_text(loops.read_text().replace("bits[i] & LOW31", "bits[0] & LOW31"))  # the first's, not the largest
    assert said() == ["1.0", "True"]
    constants = tmp_path / "grace" / "kernels" / "constants.py"
    constants.write_text(constants.read_text() + "\nMORE = 0\n")  # of what is compiled in, nobody knows which
    assert said() == ["1.0", "True"]
    assert said() == ["1.0", "False"]
