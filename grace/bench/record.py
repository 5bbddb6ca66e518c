"""The file that every benchmark leaves: what was measured, where, with which versions, and by which command."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grace._version import __version__
from grace.errors import ConfigError
from grace.files import replacing

FORMAT = 1
"""Of the file; a later one is refused."""
KINDS = ("kernels", "step", "train")
PACKAGES = ("torch", "tensorflow", "keras", "horovod", "mpi4py", "numpy", "numba", "scikit-learn")
"""Whose versions are recorded."""


@dataclasses.dataclass
class Results:
    """What a benchmark has measured so far.

    Attributes:
        kind: "kernels", "step" or "train".
        settings: what was asked for, and facts that all rows share; plain data.
        rows: one dict of plain data per measurement.
        command: the command line.
        complete: whether all that was asked for is there; False while it runs, and after an interruption.
        when: ISO 8601, UTC: when it began.
        seconds: how long it took.
        machine: platform, processor, cores, memory, GPU.
        versions: of Python and of the packages that matter.

    >>> Results("step", {"model": "resnet"}, [{"method": "none", "step_ms": 12.5}]).csv().splitlines()
    ['kind,method,step_ms', 'step,none,12.5']
    """

    kind: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    command: str = ""
    complete: bool = False
    when: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    seconds: float = 0.0
    machine: dict[str, Any] = dataclasses.field(default_factory=lambda: machine())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())

    def csv(self) -> str:
        """The rows' plain values, one line each, under one line of names; lists and dicts stay in the JSON file."""
        names = dict.fromkeys(key for row in self.rows for key, value in row.items() if _plain(value))
        text = io.StringIO()
        writer = csv.DictWriter(text, ["kind", *names], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({"kind": self.kind, **{key: value for key, value in row.items() if _plain(value)}})
        return text.getvalue()

    def save(self, folder: Path) -> list[Path]:
        """Write ``results.json`` and ``results.csv``, each at once, so that an interruption leaves the last whole one.

        Raises:
            ConfigError: the folder cannot be written.
        """
        facts = {"grace_bench": FORMAT, **dataclasses.asdict(self)}
        texts = {"results.json": json.dumps(facts, indent=1), "results.csv": self.csv()}
        make(folder)
        try:
            for name, text in texts.items():
                with replacing(folder / name) as draft:
                    draft.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error}") from error
        return [folder / name for name in texts]


def load(path: Path | str) -> Results:
    """Read ``results.json``, or the one in a folder.

    Raises:
        ConfigError: there is none, or it is not such a file; the message says which file and why.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(facts, dict) or "grace_bench" not in facts:
        raise ConfigError(f"{path} was not written by grace bench: it has no 'grace_bench'")
    if facts.pop("grace_bench") != FORMAT:
        raise ConfigError(f"{path} was written by another version of Grace, in another format; run the benchmark again")
    known = {field.name for field in dataclasses.fields(Results)}
    plain = {"settings": dict, "machine": dict, "versions": dict, "rows": list, "command": str, "when": str}
    whole = set(facts) == known and all(isinstance(facts[key], kind) for key, kind in plain.items())
    if not whole or facts["kind"] not in KINDS or not all(isinstance(row, dict) for row in facts["rows"]):
        raise ConfigError(f"{path} is damaged: it needs {', '.join(sorted(known))}, and a kind of {', '.join(KINDS)}")
    return Results(**facts)


def make(folder: Path) -> None:
    """A folder for results.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}") from error


def machine() -> dict[str, Any]:
    """This machine: platform, processor, cores that may be used, memory in bytes, and GPUs if torch is imported."""
    facts: dict[str, Any] = {"platform": platform.platform(), "processor": _processor(), "cores": _cores()}
    with contextlib.suppress(ValueError, OSError, AttributeError):
        facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def versions() -> dict[str, str]:
    """Of Python, Grace, and the packages that are installed."""
    found = {"python": platform.python_version(), "grace": __version__}
    for package in PACKAGES:
        # TensorFlow comes as tensorflow-cpu too
        for name in [package, *([f"{package}-cpu"] if package == "tensorflow" else [])]:
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(name)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
