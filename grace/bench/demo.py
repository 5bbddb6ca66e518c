"""The demo: train a small network with several methods over real ranks, and compare bytes, time and accuracy."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grace._version import __version__
from grace.errors import ConfigError, GraceError, missing_extra

METHODS = ("none", "fp16", "qsgd", "topk(ratio=0.01)", "powersgd(rank=2)")
EPOCHS, QUICK_EPOCHS = 20, 2
EXTRAS = {"torch": "torch", "numba": "torch", "sklearn": "bench", "matplotlib": "bench"}
GRACE_PERIOD = 10
"""Seconds that the launcher gets to end its ranks."""


class WorkerError(GraceError, RuntimeError):
    """A rank failed; the message is what it said."""


@dataclasses.dataclass
class Settings:
    """What to run.

    Args:
        methods: compressor specs; memory and communicator are each method's defaults.
        ranks: processes on this machine.
        epochs: passes over the training images.
        seeds: one training run each, of initial weights and data order; the same for every method.

    Raises:
        ConfigError: a value cannot work.

    >>> Settings(methods=["topq"])
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown compressor 'topq' (did you mean 'topk'?); known: ...
    """

    methods: list[str] = dataclasses.field(default_factory=lambda: list(METHODS))
    ranks: int = 2
    epochs: int = EPOCHS
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])

    def __post_init__(self) -> None:
        from grace.exchanger import build_communicator

        for key in ("methods", "seeds"):
            value = list(dict.fromkeys(getattr(self, key)))
            if not value:
                raise ConfigError(f"{key}: at least one is needed")
            setattr(self, key, value)
        for key in ("ranks", "epochs"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise ConfigError(f"seeds must be in [0, 2**32), not {self.seeds}")
        for method in self.methods:
            build_communicator(method, None, None)


def run(settings: Settings) -> list[dict[str, Any]]:
    """Train with every method and seed over ranks started by torchrun; one result per method.

    Each result holds the means over seeds of ``accuracy``, ``sent_bytes_per_step``, ``bits_per_element``,
    ``codec_ms`` and ``step_ms`` (medians over steps), ``curve`` (bytes sent, accuracy), and the ``runs``.

    Raises:
        MissingExtraError: a package is not installed.
        WorkerError: a rank failed.
    """
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            raise missing_extra({"sklearn": "scikit-learn"}.get(package, package), extra)
    with tempfile.TemporaryDirectory(prefix="grace-demo-") as folder:
        return summarize(_launch(settings, Path(folder)), settings)


def summarize(runs: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """One result per method: means over its runs."""
    results = []
    for method in settings.methods:
        own = [run for run in runs if run["method"] == method]
        accuracies = [run["accuracy"] for run in own]
        means = {
            key: statistics.fmean(run[key] for run in own)
            for key in ("accuracy", "sent_bytes_per_step", "bits_per_element", "codec_ms", "step_ms")
        }
        points = zip(*(run["curve"] for run in own), strict=True)
        curve = [[statistics.fmean(values) for values in zip(*point, strict=True)] for point in points]
        spread = (max(accuracies) - min(accuracies)) / 2
        results.append({"method": method, **means, "accuracy_spread": spread, "curve": curve, "runs": own})
    return results


def save(folder: Path, results: list[dict[str, Any]], settings: Settings, command: str) -> list[Path]:
    """Write ``results.json`` and, unless one rank sent nothing, ``accuracy.png``; returns what was written."""
    from grace.bench.picture import draw

    facts = {
        "command": command,
        "settings": dataclasses.asdict(settings),
        "versions": _versions(),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "results": results,
    }
    files = [folder / "results.json"]
    files[0].write_text(json.dumps(facts, indent=1))
    if settings.ranks > 1:
        files.append(folder / "accuracy.png")
        draw(files[1], results, settings)
    return files


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "grace": __version__}
    for package in ("torch", "numpy", "numba", "scikit-learn"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


# -- ranks ---------------------------------------------------------------------------------------------


def _launch(settings: Settings, folder: Path) -> list[dict[str, Any]]:
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(settings.ranks), "--redirects", "2", "--log-dir", str(folder / "ranks")]
    command += ["-m", "grace.bench.demo_worker", str(folder / "settings.json"), str(folder / "results.json")]
    with (folder / "launcher.log").open("w") as log, _signals_raise():
        # a session of its own, so that Ctrl-C reaches only us and the ranks end without tracebacks
        launcher = subprocess.Popen(command, env=_environment(settings.ranks), stderr=log, start_new_session=True)
        try:
            code = launcher.wait()
        finally:
            _end(launcher)
    if code != 0:
        raise WorkerError(f"the ranks failed (exit code {code})\n{_complaints(folder)}")
    return json.loads((folder / "results.json").read_text())


def _environment(ranks: int) -> dict[str, str]:
    """Each rank gets its share of the cores; gloo talks over the loopback interface."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    environment.setdefault("PYTHONSAFEPATH", "1")  # `python -m` would import what lies in the current folder
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end us as Ctrl-C does, so that the ranks end too."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(launcher: subprocess.Popen) -> None:
    """End the launcher, which ends its ranks; whatever is left of its session is killed."""
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(GRACE_PERIOD)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


def _complaints(folder: Path) -> str:
    """What the ranks wrote to stderr, and which rank a signal ended; or else all that the launcher wrote."""
    launcher = (folder / "launcher.log").read_text().strip()
    logs = {log.parent.name: log.read_text().strip() for log in sorted(folder.glob("ranks/**/stderr.log"))}
    said = [f"rank {rank}:\n{text}" for rank, text in logs.items() if text]
    for number, rank in re.findall(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)", launcher):
        said.append(f"rank {rank} was ended by {signal.Signals(int(number)).name}")
    return "\n".join(said) or launcher
