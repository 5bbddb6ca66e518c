"""Runs of ``grace bench`` that are interrupted."""

import signal
import subprocess

from grace.bench.common import results
from tests.support.command import GRACE
from tests.support.limits import HANGS, until


def has_saved_a_row(out):
    """Return True if a run that writes to a folder has saved a row."""
    return (out / "results.json").exists() and bool(results.load(out).rows)


def interrupted_bench(*args, out, by=signal.SIGINT, cwd=None, meanwhile=lambda: None):
    """Return the exit code, stderr and results of `grace bench`, interrupted when it has saved a row."""
    command = [GRACE, "bench", *args, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=cwd)
    until(lambda: has_saved_a_row(out), process)
    meanwhile()
    process.send_signal(by)
    _, err = process.communicate(timeout=HANGS)
    return process.returncode, err, results.load(out)
