"""What was measured of a cluster, an engine and methods, as a file that is read again where nothing has changed."""

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from grace.core import documents
from grace.core.atomic_files import atomic_write
from grace.core.backend import Backend
from grace.core.documents import shown
from grace.core.user_cache import user_cache
from grace.core.version import __version__
from grace.errors import ConfigError
from grace.planner.checked import Checked
from grace.planner.corrections import Step, fitted_corrections
from grace.planner.costs import Codec, Cost, Curve
from grace.planner.network import KINDS, Measured, Network
from grace.planner.step import ALONE, Contention
from grace.planner.works import Costs
from grace.session.versions import public

FORMAT = 1
MAX_AGE = 30 * 86400.0
"""Seconds after which a calibration is too old."""
MOST_STEPS = 500
"""Measured steps that are kept, the latest."""
AGAIN = "Run `grace calibrate` as the training is run"
NAMED = "GRACE_CALIBRATION"
"""The variable of the environment that names the file."""
MOST_ABREAST = 1024
"""Collectives that an engine carries at once."""
Curves = Mapping[str, Mapping[int, Curve]]


@dataclass(frozen=True)
class Key:
    """What a calibration is for.

    Attributes:
        hosts: the nodes' names in order, and how many ranks each has.
        engine: what moves the bytes, as the backend describes itself.
        framework: whose tensors are exchanged, and its version.
        grace: its version.
        python: its version.
        ranks: how many.
        threads: that a rank computes with.
    """

    hosts: tuple[tuple[str, int], ...]
    engine: str
    framework: str
    ranks: int
    threads: int
    grace: str = __version__
    python: str = platform.python_version()

    @classmethod
    def of(cls, backend: Backend, nodes: Sequence[str], framework: str, threads: int) -> "Key":
        """That of a run.

        Args:
            backend: its engine.
            nodes: the name of each rank's node.
            framework: "torch", "tensorflow" or "numpy".
            threads: that a rank computes with.

        >>> from grace.core.backend import LocalBackend
        >>> key = Key.of(LocalBackend(), ["here"], "numpy", 1)
        >>> key.engine, key.hosts, key.ranks
        ('local', (('here', 1),), 1)
        """
        version = public(str(getattr(sys.modules.get(framework), "__version__", "")))
        hosts = tuple((name, list(nodes).count(name)) for name in sorted(set(nodes)))
        engine = backend.describe().partition(", rank")[0]
        return cls(hosts, engine, f"{framework} {version}".strip(), backend.size, threads)

    @property
    def digest(self) -> str:
        """Short, for the file's name."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def differs(self, other: "Key") -> str:
        """The first difference, in words: what this has, and what the other; empty if there is none."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs:
                return f"{each.name}: {shown(ours)}, and here {shown(theirs)}"
        return ""


def default_path(key: Key) -> Path:
    """Where the calibration of a run is kept: what GRACE_CALIBRATION says, or else a file in the user's cache."""
    if chosen := os.environ.get(NAMED):
        return Path(chosen)
    return user_cache() / f"calibration-{key.digest}.json"


@dataclass(frozen=True)
class Calibration:
    """See the module.

    Attributes:
        key: what it is for.
        made: when, in seconds since 1970.
        curves: what collectives over all ranks take, by kind and number of ranks.
        inside: the same within a node; empty if there is one node, or one rank on each.
        codecs: what methods compute, by :func:`grace.planner.works.codec_key`.
        contention: what computing and exchanges cost each other.
        bucket, step: seconds of fixed work per bucket and per step.
        by_ring: whether the engine's sums go round a ring.
        concatenates: whether it gathers payloads of unequal sizes itself.
        corrections: what predictions are multiplied by, by codec and by kind of collective, as steps have taught.
        steps: measured steps, the latest last.

    >>> key = Key((("here", 1),), "local", "numpy", ranks=1, threads=1)
    >>> made = Calibration(key, made=0.0, codecs={"allreduce, none, none": Codec()})
    >>> Calibration.from_dict(made.to_dict()) == made
    True
    """

    key: Key
    made: float
    curves: Curves = field(default_factory=dict)
    inside: Curves = field(default_factory=dict)
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    contention: Contention = ALONE
    bucket: float = 0.0
    step: float = 0.0
    by_ring: bool = False
    concatenates: bool = False
    corrections: Mapping[str, float] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    def network(self, corrected: bool = True) -> Measured:
        """What collectives over all ranks take, with the corrections or without.

        Raises:
            ConfigError: there was one rank, and no link to measure.
        """
        return self._network(self.curves, corrected)

    def costs(self, corrected: bool = True, network: Network | None = None) -> Costs:
        """What the planner predicts with.

        Args:
            corrected: with the corrections.
            network: in the place of what was measured between the ranks.

        Raises:
            ConfigError: there is none, and there was one rank, and no link to measure.
        """
        factors = self.corrections if corrected else {}
        codecs = {name: codec.times(factors.get(name, 1.0)) for name, codec in self.codecs.items()}
        inside = self._network(self.inside, corrected) if self.inside else None
        return Costs(
            self.network(corrected) if network is None else network,
            codecs,
            inside,
            self.contention,
            self.bucket,
            self.step,
            by_ring=self.by_ring,
            concatenates=self.concatenates,
        )

    def _network(self, curves: Curves, corrected: bool) -> Measured:
        if not curves:
            raise ConfigError(
                f"this calibration ({self.key.engine}) has no times of collectives. {AGAIN}, by all ranks"
            )
        factors = self.corrections if corrected else {}
        return Measured({kind: _times_curves(by_ranks, factors.get(kind, 1.0)) for kind, by_ranks in curves.items()})

    def with_step(self, step: Step, corrected: bool = True) -> "Calibration":
        """The same with one measured step more, and corrections that follow from all of them.

        Args:
            step: what was predicted, and measured.
            corrected: it was predicted by :meth:`costs` with corrections, which are taken out of it again.
        """
        if corrected:
            step = step.without(self.corrections)
        steps = (*self.steps, step)[-MOST_STEPS:]
        return replace(self, steps=steps, corrections=fitted_corrections(steps))

    # -- the file --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "format": FORMAT,
            "key": {**asdict(self.key), "hosts": [list(host) for host in self.key.hosts]},
            "made": self.made,
            "curves": _curves_to(self.curves),
            "inside": _curves_to(self.inside),
            "codecs": {name: asdict(codec) for name, codec in self.codecs.items()},
            "contention": asdict(self.contention),
            "bucket": self.bucket,
            "step": self.step,
            "by_ring": self.by_ring,
            "concatenates": self.concatenates,
            "corrections": dict(self.corrections),
            "steps": [step.to_dict() for step in self.steps],
        }

    @classmethod
    def from_dict(cls, document: Any) -> "Calibration":
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: something is missing, unknown, of a wrong type, or no time.
        """
        found = Checked(document, "")
        if (version := found.whole("format", 1)) != FORMAT:
            raise ConfigError(f"is of format {version}; this Grace reads format {FORMAT}")
        key = found.part("key")
        hosts = [Checked({"host": host}, "key.hosts").pair("host") for host in key.list("hosts")]
        names = {name: key.text(name) for name in ("engine", "framework", "grace", "python")}
        made = cls(
            key=Key(tuple(hosts), ranks=key.whole("ranks", 1), threads=key.whole("threads", 1), **names),
            made=found.seconds("made"),
            curves=_curves_from(found.part("curves")),
            inside=_curves_from(found.part("inside")),
            codecs={name: _codec(found.part("codecs").part(name)) for name in found.part("codecs").names()},
            contention=_contention(found.part("contention")),
            bucket=found.seconds("bucket"),
            step=found.seconds("step"),
            by_ring=found.truth("by_ring"),
            concatenates=found.truth("concatenates"),
            corrections=found.part("corrections").all_seconds(least=1e-6),
            steps=tuple(Step.from_dict(step, f"steps[{i}]") for i, step in enumerate(found.list("steps"))),
        )
        key.all_known()
        found.all_known()
        if sum(count for _, count in hosts) != made.key.ranks:
            raise ConfigError(f"is damaged: key.hosts has {sum(n for _, n in hosts)} ranks, key.ranks {made.key.ranks}")
        return made

    def write(self, path: Path) -> None:
        """To a file, which is there whole or not at all; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def read(path: Path, key: Key | None = None, max_age: float | None = MAX_AGE, now: float | None = None) -> Calibration:
    """A calibration from its file.

    Args:
        path: of the file.
        key: what it must be for; anything if left out.
        max_age: seconds that it may be old; None for any.
        now: seconds since 1970; the clock's if left out.

    Raises:
        ConfigError: it cannot be read, is damaged, of another format, for something else, or too old; the message says
            which, and names the file.
    """
    try:
        found = Calibration.from_dict(documents.parse(documents.read(path), str(path), infinite=True))
    except ConfigError as error:
        said = str(error)
        raise ConfigError(f"{said if said.startswith(str(path)) else f'{path}: {said}'}. {AGAIN}") from None
    if key is not None and (difference := found.key.differs(key)):
        raise ConfigError(f"{path}: is for another run: it has {difference}. {AGAIN}")
    age = (time.time() if now is None else now) - found.made
    if max_age is not None and age > max_age:
        raise ConfigError(f"{path}: is {age / 86400:.0f} days old, and taken up to {max_age / 86400:.0f}. {AGAIN}")
    if age < -86400:
        raise ConfigError(f"{path}: is damaged: it was made {-age / 86400:.0f} days from now. {AGAIN}")
    return found


PARTS = ("start", "middle", "finish")


def _times_curves(by_ranks: Mapping[int, Curve], factor: float) -> dict[int, Curve]:
    """The same with all seconds multiplied."""
    return {n: curve.times(factor) for n, curve in by_ranks.items()}


def _curves_to(curves: Curves) -> dict[str, dict[str, list[list[float]]]]:
    return {
        kind: {str(ranks): [list(point) for point in curve.points] for ranks, curve in by_ranks.items()}
        for kind, by_ranks in curves.items()
    }


def _curves_from(found: Checked) -> dict[str, dict[int, Curve]]:
    """Curves, which rise."""
    curves: dict[str, dict[int, Curve]] = {}
    for kind in found.names():
        by_ranks, where = found.part(kind), f"{found.where}.{kind}"
        if kind not in KINDS:
            raise ConfigError(f"is damaged: {where}: there is no such collective; there are {', '.join(KINDS)}")
        curves[kind] = {}
        for text in by_ranks.names():
            if not (text.isascii() and text.isdecimal() and len(text) < 8 and int(text) >= 2 and text[0] != "0"):
                raise ConfigError(f"is damaged: {where}: {text!r} is no number of ranks from 2 on")
            curves[kind][int(text)] = _curve(by_ranks.list(text), f"{where}.{text}")
        if not curves[kind]:
            raise ConfigError(f"is damaged: {where} is of no number of ranks")
    return curves


def _curve(points: list[Any], where: str) -> Curve:
    taken: list[tuple[float, float]] = []
    for i, point in enumerate(points):
        if not isinstance(point, list) or len(point) != 2:
            raise ConfigError(f"is damaged: {where}[{i}] must be bytes and seconds, not {shown(point)}")
        pair = Checked({"bytes": point[0], "seconds": point[1]}, f"{where}[{i}]")
        nbytes, seconds = pair.seconds("bytes", 1e-12), pair.seconds("seconds", 1e-12)
        if taken and not (nbytes > taken[-1][0] and seconds >= taken[-1][1]):
            raise ConfigError(
                f"is damaged: {where} must rise: {taken[-1][1]:g} s for {taken[-1][0]:g} bytes, and {seconds:g} s for "
                f"{nbytes:g}"
            )
        taken.append((nbytes, seconds))
    if not taken:
        raise ConfigError(f"is damaged: {where} is empty")
    return Curve(tuple(taken))


def _contention(found: Checked) -> Contention:
    abreast = found.whole("abreast", 1)
    if abreast > MOST_ABREAST:
        raise ConfigError(f"is damaged: contention.abreast must be at most {MOST_ABREAST}, not {abreast}")
    made = Contention(found.seconds("wire"), found.seconds("encode"), abreast)
    found.all_known()
    return made


def _codec(found: Checked) -> Codec:
    names = [each.name for each in fields(Cost)]
    costs = {part: Cost(**found.part(part).all_seconds(names)) for part in PARTS}
    bits = None if found.maybe("bits") is None else found.seconds("bits", 1e-12)
    found.all_known()
    return Codec(**costs, bits=bits)
