"""Train a small model with several methods over real ranks, and compare bytes, time and quality."""

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
from grace.bench.task import TASKS, task_class
from grace.errors import ConfigError, GraceError, missing_extra
from grace.registry import aliases, known

METHODS = ("none", "fp16", "qsgd", "topk(ratio=0.01)", "powersgd(rank=2)")
QUICK_EPOCHS = 2
COMPOSITIONS = ("topk | efsignsgd", "topk | qsgd(levels=7, bucket_size=64, norm=max)")
MEANS = ("quality", "sent_bytes_per_step", "bits_per_element", "codec_ms", "step_ms")
"""What is averaged over seeds."""
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
        epochs: passes over the training data; the task's own number if left out.
        seeds: one training run each, of initial weights and data order; the same for every method.
        task: "digits" or "charlm".
        rates: learning rates of methods that need another than the task's.

    Raises:
        ConfigError: a value cannot work.

    >>> Settings(methods=["topq"])
    Traceback (most recent call last):
    grace.errors.ConfigError: unknown compressor 'topq' (did you mean 'topk'?); known: ...
    """

    methods: list[str] = dataclasses.field(default_factory=lambda: list(METHODS))
    ranks: int = 2
    epochs: int | None = None
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    task: str = "digits"
    rates: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        from grace.exchanger import build_communicator

        for key in ("methods", "seeds"):
            value = list(dict.fromkeys(getattr(self, key)))
            if not value:
                raise ConfigError(f"{key}: at least one is needed")
            setattr(self, key, value)
        for key in ("ranks", "epochs"):
            if (getattr(self, key) or 1) < 1 or getattr(self, key) == 0:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise ConfigError(f"seeds must be in [0, 2**32), not {self.seeds}")
        if self.task not in TASKS:
            raise ConfigError(f"unknown task {self.task!r}; known: {', '.join(sorted(TASKS))}")
        for method in self.methods:
            build_communicator(method, None, None)
        for method, rate in self.rates.items():
            if method not in self.methods:
                raise ConfigError(f"a learning rate is given for {method!r}, which is not among the methods")
            if not rate > 0:
                raise ConfigError(f"the learning rate of {method} must be positive, not {rate}")


def every_method() -> list[str]:
    """All compressors that can be built without parameters, the casts by their short names, and two compositions.

    >>> every_method()[:4], every_method()[-1]
    (['none', 'adaptive', 'bf16', 'dgc'], 'topk | qsgd(levels=7, bucket_size=64, norm=max)')
    """
    names = [name for name, cls in known("compressor").items() if dataclasses.MISSING not in cls.parameters().values()]
    short = [name for name, spec in aliases("compressor").items() if spec["name"] == "cast"]
    rest = sorted({*names, *short} - {"cast", "none"})
    return ["none", *rest, *COMPOSITIONS]


def run(settings: Settings, runs_file: Path | None = None) -> list[dict[str, Any]]:
    """Train with every method and seed over ranks started by torchrun; one result per method.

    Each result holds the means over seeds of ``quality``, ``sent_bytes_per_step``, ``bits_per_element``,
    ``codec_ms`` and ``step_ms`` (medians over steps), ``curve`` (bytes sent, quality), and the ``runs``.

    Args:
        settings: what to run.
        runs_file: where each run is recorded, one JSON object a line, when it ends; so what is finished is kept.

    Raises:
        MissingExtraError: a package is not installed.
        WorkerError: a rank failed.
    """
    for package, extra in EXTRAS.items():
        if importlib.util.find_spec(package) is None:
            raise missing_extra({"sklearn": "scikit-learn"}.get(package, package), extra)
    with tempfile.TemporaryDirectory(prefix="grace-bench-") as folder:
        runs_file = Path(folder, "runs.jsonl") if runs_file is None else runs_file
        runs_file.write_text("")
        _launch(settings, Path(folder), runs_file)
        return summarize(load_runs(runs_file), settings)


def load_runs(runs_file: Path) -> list[dict[str, Any]]:
    """The runs that ended."""
    return [json.loads(line) for line in runs_file.read_text().splitlines()]


def summarize(runs: list[dict[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """One result per method that has runs: means over its runs."""
    results = []
    for method in settings.methods:
        own = [run for run in runs if run["method"] == method]
        if not own:
            continue
        means = {key: statistics.fmean(run[key] for run in own) for key in MEANS}
        points = zip(*(run["curve"] for run in own), strict=True)
        curve = [[statistics.fmean(values) for values in zip(*point, strict=True)] for point in points]
        qualities = [run["quality"] for run in own]
        spread = (max(qualities) - min(qualities)) / 2
        results.append({"method": method, **means, "quality_spread": spread, "curve": curve, "runs": own})
    return results


def save(folder: Path, results: list[dict[str, Any]], settings: Settings, command: str) -> list[Path]:
    """Write ``results.json`` and, unless one rank sent nothing, a picture; returns what was written."""
    from grace.bench.picture import draw

    task = task_class(settings.task)
    facts = {
        "command": command,
        "task": {"name": settings.task, "about": task.about, "metric": task.metric},
        "settings": dataclasses.asdict(settings),
        "versions": _versions(),
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "results": results,
    }
    files = [folder / "results.json"]
    files[0].write_text(json.dumps(facts, indent=1))
    if settings.ranks > 1:
        files.append(folder / f"{task.metric}.png")
        draw(files[1], results, settings)
    return files


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "grace": __version__}
    for package in ("torch", "numpy", "numba", "scikit-learn"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


# -- ranks ---------------------------------------------------------------------------------------------


def _launch(settings: Settings, folder: Path, runs_file: Path) -> None:
    (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(settings.ranks), "--redirects", "2", "--log-dir", str(folder / "ranks")]
    command += ["-m", "grace.bench.worker", str(folder / "settings.json"), str(runs_file)]
    with (folder / "launcher.log").open("w") as log, _signals_raise():
        # a session of its own, so that Ctrl-C reaches only us and the ranks end without tracebacks
        launcher = subprocess.Popen(command, env=_environment(settings.ranks), stderr=log, start_new_session=True)
        try:
            code = launcher.wait()
        finally:
            _end(launcher)
    if code != 0:
        raise WorkerError(f"the ranks failed (exit code {code})\n{_complaints(folder)}")


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
