"""Measurements of a cluster, an engine and methods, in a file for ``grace plan``."""

import math
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from grace.core import documents
from grace.core.backend import Backend
from grace.core.documents import shown
from grace.core.schema_words import read_record
from grace.core.version import __version__
from grace.errors import ConfigError
from grace.planner.costs import CodecCost
from grace.planner.exchange_costs import Costs
from grace.planner.network import MeasuredNetwork, Network
from grace.session.versions import public

FORMAT = 4
MAX_AGE = 30 * 86400.0
"""Seconds after which a calibration is too old."""
AGAIN = "Run `grace calibrate` as the training is run"


@dataclass(frozen=True)
class Key:
    """Run that a calibration is for; ``hosts`` are the numbers of ranks by the names of nodes."""

    hosts: Mapping[str, int]
    engine: str
    framework: str
    ranks: int
    threads: int
    grace: str = __version__
    python: str = platform.python_version()

    @classmethod
    def of_run(cls, backend: Backend, nodes: Sequence[str], framework: str, threads: int) -> "Key":
        """Return the key of a run on an engine, whose ranks are on these nodes."""
        version = public(str(getattr(sys.modules.get(framework), "__version__", "")))
        hosts = {name: list(nodes).count(name) for name in sorted(set(nodes))}
        engine = backend.describe().partition(", rank")[0]  # the same on all ranks
        return cls(hosts, engine, f"{framework} {version}".strip(), backend.size, threads)

    def __post_init__(self) -> None:
        if min(self.ranks, self.threads, *self.hosts.values()) < 1 or sum(self.hosts.values()) != self.ranks:
            raise ConfigError(f"the hosts {shown(self.hosts)} do not have {self.ranks} ranks of {self.threads} threads")

    def differs(self, other: "Key") -> str:
        """Return the first difference from another key, in words; empty if there is none."""
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs:
                return f"{each.name}: {shown(ours)}, and here {shown(theirs)}"
        return ""


@dataclass(frozen=True)
class Calibration:
    """Measurements of a cluster, an engine and methods.

    Attributes:
        key: the run that they are for.
        made: when they were made, in seconds since 1970.
        network: what collectives over all ranks take; None if there was one rank.
        inside: the same within a node; None if there is one node, or one rank on each.
        codecs: what methods compute, by :func:`grace.planner.exchange_costs.codec_key`.
        by_ring: True if the engine's sums go round a ring.
        concatenates: True if the engine gathers payloads of unequal sizes itself.
    """

    key: Key
    made: float
    network: MeasuredNetwork | None = None
    inside: MeasuredNetwork | None = None
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    by_ring: bool = False
    concatenates: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.made < math.inf:
            raise ConfigError(f"made must be a number from 0 on, not {self.made}")

    def costs(self, network: Network) -> Costs:
        """Return what the planner predicts with over a network between the ranks, the measured one or another."""
        return Costs(network, self.codecs, self.inside, self.by_ring, self.concatenates)

    def to_dict(self) -> dict[str, object]:
        """Return the file's document."""
        return {"format": FORMAT, **documents.to_plain(self)}

    @classmethod
    def from_dict(cls, document: object) -> "Calibration":
        """Return the calibration of a document, or raise a ConfigError that names what is wrong."""
        version = document.get("format") if isinstance(document, dict) else None
        if isinstance(version, int) and version != FORMAT:
            raise ConfigError(f"is of format {version}; this Grace reads format {FORMAT}")
        try:
            if isinstance(document, dict):
                document = {name: value for name, value in document.items() if name != "format"}
            return read_record(cls, document, "calibration")
        except ConfigError as error:
            raise ConfigError(f"is damaged: {error}") from None

    def write(self, path: Path) -> None:
        """Write a file, which is there whole or not at all; its folder is made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        documents.write(path, self.to_dict())


def read(path: Path, key: Key | None = None, max_age: float | None = MAX_AGE, now: float | None = None) -> Calibration:
    """Return the calibration of a file.

    Args:
        path: the file.
        key: the run that it must be for; any if left out.
        max_age: seconds that it may be old; None for any.
        now: seconds since 1970; the clock's if left out.
    """
    try:
        found = Calibration.from_dict(documents.parse(documents.read(path), str(path), infinite=True))
    except ConfigError as error:
        said = str(error)
        raise ConfigError(f"{said if said.startswith(str(path)) else f'{path}: {said}'}. {AGAIN}") from None
    difference = "" if key is None else found.key.differs(key)
    if difference:
        raise ConfigError(f"{path}: is for another run: it has {difference}. {AGAIN}")
    age = (time.time() if now is None else now) - found.made
    if max_age is not None and age > max_age:
        raise ConfigError(f"{path}: is {age / 86400:.0f} days old, and taken up to {max_age / 86400:.0f}. {AGAIN}")
    if age < -86400:  # a day: clocks of machines may differ, and time zones be set wrongly
        raise ConfigError(f"{path}: is damaged: it was made {-age / 86400:.0f} days from now. {AGAIN}")
    return found
