"""Common life cycle of the commands of ``grace bench``: measure, save finished rows, show them, and report the end."""

import errno
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from grace.bench.common.ending import Ending
from grace.bench.common.results import Results, Settings
from grace.bench.report.tables import SHOW
from grace.errors import ConfigError, require


class BenchmarkRun(Ending):
    """Benchmark that is under way.

    It writes to a folder, and shows on its console; without a folder it does neither. ``ending`` goes to
    :class:`Ending`.
    """

    def __init__(self, kind: str, settings: Settings, out: Path | None, **ending: str):
        super().__init__(f"grace bench {kind}", **ending)
        self.console = Console(highlight=False, quiet=out is None)
        self.results = Results(kind, settings, command=shlex.join(["grace", *sys.argv[1:]]))
        self.out = out
        self.began = time.monotonic()
        self.earlier = out is not None and (out / "results.json").exists()
        """True if the folder has results of an earlier run, which stay until this one has a row."""
        if out is not None:
            require("matplotlib", "bench")  # for the report at the end
            if self.earlier and not os.access(out, os.W_OK | os.X_OK):
                raise ConfigError(f"cannot write to {out}: {os.strerror(errno.EACCES)}")
        self.save()  # a folder that cannot be written to fails before the measurements

    def save(self) -> None:
        """Write the results so far."""
        self.results.seconds = time.monotonic() - self.began
        if self.out is not None and (self.results.rows or not self.earlier):
            self.results.save(self.out)

    def measure(self, function: Callable[[], None]) -> "BenchmarkRun":
        """Call the function that fills in the results, note how it ends, write the results, and show them."""
        try:
            with self.record_failure():
                function()
                self.results.complete = True
            if self.code and self.results.rows:
                self.message += f"; what is finished is in {self.out}"
        finally:
            self.save()  # also after an error of ours: hours of rows are there
        SHOW[self.results.kind](self.console, self.results)
        return self

    def report_and_exit(self) -> None:
        """Write the report, and print the names of written files; or exit with the failure."""
        report = self.out is not None and write_report_of(self.out, [self.results])
        self.exit_if_failed()
        files = f"results.json, results.csv{' and report.html' if report else ''}"
        self.console.print(f"\nWrote {files} to {self.out} after {self.results.seconds:.0f} s.", soft_wrap=True)


def write_report_of(folder: Path, results: Sequence[Results]) -> Path | None:
    """Write ``report.html`` on results into a folder, if any of them has rows."""
    from grace.bench.report.page import write_report

    return write_report(folder / "report.html", results) if any(each.rows for each in results) else None
