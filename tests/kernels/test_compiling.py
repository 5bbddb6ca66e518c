"""Compiled loops are kept, until some loop is written otherwise."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import grace

pytest.importorskip("numba", reason="compiled loops are Numba's")

PROGRAM = """
import numpy as np
from grace.kernels.numba.compiling import Listener, event
from grace.kernels.numba.rounding import MAX, _scale
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
        command = [sys.executable, "-c", before + PROGRAM]
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
    loops = tmp_path / "grace" / "kernels" / "numba" / "loops.py"
    loops.write_text(loops.read_text().replace("bits[i] & LOW31", "bits[0] & LOW31"))  # the first's, not the largest
    assert said() == ["1.0", "True"]
    constants = tmp_path / "grace" / "kernels" / "constants.py"
    constants.write_text(constants.read_text() + "\nMORE = 0\n")  # of what is compiled in, nobody knows which
    assert said() == ["1.0", "True"]
    assert said() == ["1.0", "False"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_a_loop_is_compiled(tmp_path, monkeypatch, number):
    import numpy as np
    from numba import config
    from numba.core import event

    from grace.kernels.numba.compiling import loop

    class Sending(event.Listener):
        def on_start(self, event):
            signal.raise_signal(number)

        def on_end(self, event):
            pass

    def interrupted(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    compiled = loop()(lambda x: 2 * x)
    before = signal.signal(number, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), event.install_listener("numba:run_pass", Sending()):
            compiled(np.float32(1))
        assert signal.getsignal(number) is interrupted
    finally:
        signal.signal(number, before)
    assert len(compiled.signatures) == 1  # not half of it
    assert compiled(np.float32(3)) == 6
