"""``grace bench`` in a process of its own: runs to the end, and runs that are interrupted."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from grace.bench.common import results
from tests.support.limits import HANGS

GRACE = str(Path(sys.executable).with_name("grace"))


def bench(*args, code=0, cwd=None, program=GRACE, launcher=(), **environment):
    """Return stdout and stderr of `grace bench` at 80 columns, which must exit with a code."""
    env = {**os.environ, "COLUMNS": "80", **environment}
    command = [*launcher, program, "bench", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANGS, cwd=cwd)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def interrupted_bench(*args, out, cwd=None, meanwhile=lambda: None):
    """Return the exit code, stderr and results of `grace bench`, interrupted by Ctrl-C when it has saved a row."""
    command = [GRACE, "bench", *args, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=cwd)
    deadline = time.monotonic() + HANGS
    while not ((out / "results.json").exists() and results.load(out).rows):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    meanwhile()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=HANGS)
    return process.returncode, err, results.load(out)
