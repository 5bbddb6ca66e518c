"""Train a small model with several methods over real ranks, and compare bytes, time and quality."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import statistics
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grace._version import __version__
from grace.bench.engines import engine_of, launcher
from grace.bench.launch import run_ranks
from grace.bench.progress import Display
from grace.bench.task import FRAMEWORKS, TASKS, check_framework, task_class
from grace.errors import ConfigError, missing_extra
from grace.registry import aliases, known

METHODS = ("none", "fp16", "qsgd", "topk(ratio=0.01)", "powersgd(rank=2)")
QUICK_EPOCHS = 2
COMPOSITIONS = ("topk | efsignsgd", "topk | qsgd(levels=7, bucket_size=64, norm=max)")
MEANS = ("quality", "sent_bytes_per_step", "bits_per_element", "codec_ms", "step_ms")
"""What is averaged over seeds."""
SHOWN = {"sklearn": "bench", "matplotlib": "bench"}
EXTRAS = {name: {name: name, "numba": name, **SHOWN} for name in FRAMEWORKS}
"""The packages that a benchmark of a framework needs, and the extra that installs each."""
PACKAGES = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "numpy", "numba", "scikit-learn")
"""Whose versions are recorded."""


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
        framework: "torch" or "tensorflow".

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
    framework: str = "torch"

    def __post_init__(self) -> None:
        from grace.plans import build_communicator

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
        check_framework(self.framework)
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
    """Train with every method and seed over ranks on this machine; one result per method.

    Each result holds the means over seeds of ``quality``, ``sent_bytes_per_step``, ``bits_per_element``,
    ``codec_ms`` and ``step_ms`` (medians over steps), ``curve`` (bytes sent, quality), and the ``runs``.

    Args:
        settings: what to run.
        runs_file: where each run is recorded, one JSON object a line, when it ends; so what is finished is kept.

    Raises:
        MissingExtraError: a package or a launcher is not installed.
        WorkerError: a rank failed.
    """
    for package, extra in EXTRAS[settings.framework].items():
        if importlib.util.find_spec(package) is None:
            raise missing_extra({"sklearn": "scikit-learn"}.get(package, package), extra)
    engine = engine_of(settings.framework, settings.ranks)
    with tempfile.TemporaryDirectory(prefix="grace-bench-") as temporary:
        folder = Path(temporary)
        runs_file = folder / "runs.jsonl" if runs_file is None else runs_file
        runs_file.write_text("")
        (folder / "settings.json").write_text(json.dumps(dataclasses.asdict(settings)))
        program = ["-m", "grace.bench.worker", str(folder), str(runs_file)]
        with Display(settings, folder / "progress.jsonl") as display, launcher(engine, settings.ranks) as start:
            run_ranks(start, program, folder, display.update)
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
    for package in PACKAGES:
        # TensorFlow comes as tensorflow-cpu too
        for name in [package, *([f"{package}-cpu"] if package == "tensorflow" else [])]:
            with contextlib.suppress(PackageNotFoundError):
                versions[package] = version(name)
    return versions
