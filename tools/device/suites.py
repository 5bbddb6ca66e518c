"""Tests, run by pytest alone: each is an item of its own, so that one that hangs or crashes ends no other."""

import os
from pathlib import Path
from typing import Any

import pytest

from tools.device.events import LONGEST, Log, end_if_broken

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests/device"
KERNELS = [ROOT / f"tests/kernels/test_triton_{name}.py" for name in ("bits", "buckets", "low_rank")]


def bits(log: Log) -> None:
    """Compare what Triton's kernels compute with the reference, bit for bit where that is said of them."""
    run(log, *KERNELS)


def tests(log: Log) -> None:
    """Run the tests of a GPU."""
    run(log, HERE)


def run(log: Log, *paths: Path) -> None:
    """Run this process's share of the tests in some files, without plugins, and with no conftest but tests/device's."""
    alone = ["-c", str(HERE / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(HERE), "-p", "no:faulthandler"]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    code = pytest.main([*alone, *map(str, paths)], plugins=[Told(log)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(int(code))


class Told:
    """A plugin of pytest's that chooses this process's tests, and tells how each of them ends."""

    def __init__(self, log: Log):
        self.log, self.state, self.error = log, "done", ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        every = self.log.settings["every"]
        if every > 1:  # in the interpreter, where tests of a GPU alone are skipped
            items[:] = [item for item in items if "gpu" not in item.fixturenames]
        names = [item.nodeid for item in items]
        names = names[min(every // 5, max(0, len(names) - 1)) :: every]
        left = set(self.log.left(names))
        items[:] = [item for item in items if item.nodeid in left]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            with self.log.item(report.nodeid):
                raise ImportError(report.longreprtext)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.state, self.error = "done", ""
        self.log.begin(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.state, self.error = "failed", report.longreprtext[-LONGEST:]
        elif report.skipped and self.state == "done":
            self.state, self.error = "skipped", report.longrepr[2] if isinstance(report.longrepr, tuple) else ""

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.log.end(nodeid, self.state, **({"error": self.error} if self.error else {}))
        if self.state == "failed":
            end_if_broken()
