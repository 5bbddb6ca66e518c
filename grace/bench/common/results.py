"""File that every benchmark writes: measured rows, machine, versions, and command."""

import contextlib
import csv
import dataclasses
import io
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

from grace.core import documents
from grace.core.atomic_files import atomic_write
from grace.core.version import __version__
from grace.errors import ConfigError, GraceError, shortened
from grace.planner.measure_network import cores

FORMAT = 1
"""Format of the file; a later one is refused."""
KINDS = {
    "kernels": ("tensor", "method"),
    "step": ("engine", "ranks", "bandwidth", "name"),
    "train": ("ranks", "bandwidth", "optimizer", "method"),
}
"""Keys that identify the rows of each kind of results; the last one is the row's name."""
Row = dict[str, Any]
"""Measurement: plain data, whose keys are the benchmark's."""
Settings = dict[str, Any]
"""Settings of a benchmark as they are recorded, and facts that all rows share: plain data."""
PACKAGES = ("torch", "triton", "tensorflow", "keras", "horovod", "mpi4py", "numpy", "numba", "scikit-learn")
"""Packages whose versions are recorded."""


class Machine(TypedDict, total=False):
    """Facts of a machine; memory is unknown on some systems, and GPUs without torch."""

    platform: str
    processor: str
    cores: int
    memory_bytes: int
    gpus: list[str]


@dataclasses.dataclass
class Results:
    """Results that a benchmark has measured so far.

    Attributes:
        kind: one of :data:`KINDS`.
        settings: the benchmark's settings, and facts that all rows share; plain data.
        rows: one dict of plain data per measurement.
        command: the command line.
        complete: True if all rows are there; False while it runs, and after an interruption.
        when: the time at which it began, ISO 8601, UTC.
        seconds: the seconds that it took.
        machine: platform, processor, cores, memory, GPU.
        versions: versions of Python and of the packages that matter.

    >>> Results("step", {"model": "resnet"}, [{"method": "none", "step_ms": 12.5}]).csv().splitlines()
    ['kind,method,step_ms', 'step,none,12.5']
    """

    kind: str
    settings: Settings
    rows: list[Row] = dataclasses.field(default_factory=list)
    command: str = ""
    complete: bool = False
    when: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    seconds: float = 0.0
    machine: Machine = dataclasses.field(default_factory=lambda: machine())
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: versions())

    def csv(self) -> str:
        """Return the rows' plain values, one line each, under one line of names; lists and dicts are left out."""
        names = dict.fromkeys(key for row in self.rows for key, value in row.items() if _plain(value))
        text = io.StringIO()
        writer = csv.DictWriter(text, ["kind", *names], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({"kind": self.kind, **{key: value for key, value in row.items() if _plain(value)}})
        return text.getvalue()

    @property
    def gpu(self) -> str:
        """The recorded GPU, and the versions that matter there."""
        device = ", ".join(self.settings[key] for key in ("gpu", "gpu_driver", "gpu_runtime") if self.settings.get(key))
        return f"{device}; " + ", ".join(f"{name} {self.versions.get(name)}" for name in ("torch", "triton"))

    def save(self, folder: Path) -> list[Path]:
        """Write ``results.json`` and ``results.csv``, each atomically."""
        facts = {"grace_bench": FORMAT, **dataclasses.asdict(self)}
        make_folder(folder)
        try:
            for name, text in (("results.json", json.dumps(facts, indent=1)), ("results.csv", self.csv())):
                with atomic_write(folder / name) as draft:
                    draft.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write to {folder}: {error}") from error
        return [folder / "results.json", folder / "results.csv"]


def load(path: Path | str) -> Results:
    """Read ``results.json``, or the one in a folder; a ConfigError says which file is none, and why."""
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    facts = documents.parse(documents.read(path), f"{path}", infinite=True)
    if not isinstance(facts, dict) or "grace_bench" not in facts:
        raise ConfigError(f"{path} was not written by grace bench: it has no 'grace_bench'")
    if facts.pop("grace_bench") != FORMAT:
        raise ConfigError(f"{path} was written by another version of Grace, in another format; run the benchmark again")
    known = {field.name for field in dataclasses.fields(Results)}
    plain = {"settings": dict, "machine": dict, "versions": dict, "rows": list, "command": str, "when": str}
    complete = set(facts) == known and all(isinstance(facts[key], kind) for key, kind in plain.items())
    if not complete or facts["kind"] not in KINDS or not all(isinstance(row, dict) for row in facts["rows"]):
        raise ConfigError(f"{path} is damaged: it needs {', '.join(sorted(known))}, and a kind of {', '.join(KINDS)}")
    for number, row in enumerate(facts["rows"], start=1):
        wrong = [key for key in KINDS[facts["kind"]] if key not in row or not _plain(row[key])]
        if wrong:
            raise ConfigError(f"{path}: row {number} of the {facts['kind']} results has no {', '.join(wrong)}")
    return Results(**facts)


@contextlib.contextmanager
def naming_damage(*paths: Path) -> Iterator[None]:
    """Return a context in which the results of files are shown: a ConfigError names them if values are no results."""
    try:
        yield
    except GraceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        named = " or ".join(map(str, paths))
        raise ConfigError(
            shortened(f"{named} is damaged, or of another kind ({type(error).__name__}: {error}): measure it anew")
        ) from error


def make_folder(folder: Path) -> None:
    """Make a folder for results; raise a ConfigError if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}") from error


def machine() -> Machine:
    """Return facts of this machine; GPUs are among them if torch is imported."""
    facts: Machine = {"platform": platform.platform(), "processor": _processor(), "cores": len(cores())}
    with contextlib.suppress(ValueError, OSError, AttributeError):
        facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if "torch" in sys.modules:  # not imported for this alone: it takes seconds
        import torch

        facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return facts


def versions() -> dict[str, str]:
    """Return the versions of Python, Grace, and the packages that are installed."""
    found = {"python": platform.python_version(), "grace": __version__}
    for package in PACKAGES:  # from metadata: importing them would take seconds
        # TensorFlow may be installed as tensorflow-cpu
        for name in [package, *([f"{package}-cpu"] if package == "tensorflow" else [])]:
            with contextlib.suppress(PackageNotFoundError):
                found[package] = version(name)
    if "torch" in sys.modules:  # names the build, such as +cu130, which a wheel's metadata leave out
        found["torch"] = sys.modules["torch"].__version__
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
