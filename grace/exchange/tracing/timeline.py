"""The timeline of all ranks: their traces merged into one file in Chrome's trace format."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

from grace.core.atomic_files import atomic_write
from grace.core.version import __version__
from grace.errors import ConfigError
from grace.exchange.tracing.recorder import COLLECTIVE_TRACK
from grace.exchange.tracing.trace_lines import entry_of

Event = dict[str, Any]


@dataclasses.dataclass
class RankTrace:
    """Trace of one rank, read from its file.

    Attributes:
        facts: "rank", "size", "host", "engine", "offset" (nanoseconds from its clock to the epoch's), "tracks" (names
            by number), "variables" (shape, dtype, method, memory and communicator by name), and "waits": the library
            that waits for collectives, if Grace does not.
        events: events in Chrome's format, but in nanoseconds of the rank's clock.
        damage: descriptions of lines that were left out.
    """

    facts: dict[str, Any]
    events: list[Event]
    damage: list[str] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the rank, for messages."""
        return f"rank {self.facts['rank']}"

    @property
    def steps(self) -> list[Event]:
        """Events of completely recorded steps."""
        return [event for event in self.events if event["name"] == "step"]


def read(path: Path) -> RankTrace:
    """Read one rank's file. Damaged lines are left out and noted; a last line that was cut off because the rank was
    killed is left out silently.

    Raises:
        ConfigError: it was not written by a rank, or by one with another version.
    """
    facts: dict[str, Any] = {}
    events, damage = [], []
    try:
        lines = path.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            entry = entry_of(line, facts)
        except ValueError as error:
            where = f"{path}, line {number}: {error}"
            if not facts:
                raise ConfigError(where) from error
            if number < len(lines):  # the last one has no end
                damage.append(where)
            continue
        if "ph" in entry:
            events.append(entry)
            continue
        facts = facts or {"tracks": {}, "variables": {}}
        for key, value in entry.items():
            facts[key] = {**facts.get(key, {}), **value} if key in ("tracks", "variables") else value
    if not facts:
        raise ConfigError(f"{path} is empty")
    return RankTrace(facts, events, damage)


def load(folder: Path, damage: list[str] | None = None) -> list[RankTrace]:
    """Return the traces of all ranks in a folder, in rank order.

    Args:
        folder: the folder.
        damage: list that descriptions of unreadable lines and files are appended to; None to drop them.

    Raises:
        ConfigError: the folder does not exist, has no readable file, or has files of different runs.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    paths = sorted(folder.glob("rank*.jsonl"))
    if not paths:
        raise ConfigError(
            f"no rank has left a trace in {folder}: programs that use Grace do, on every rank, if GRACE_TRACE names "
            "the folder while they run"
        )
    found: dict[int, RankTrace] = {}
    faults = [] if damage is None else damage
    for path in paths:
        try:
            rank = read(path)
        except ConfigError as error:
            faults.append(str(error))
            continue
        faults += rank.damage
        if rank.facts["rank"] in found:
            faults.append(f"{path}: another file is of {rank.name}, too")
        found.setdefault(rank.facts["rank"], rank)
    if not found:
        raise ConfigError(faults[0])
    ranks = [rank for _, rank in sorted(found.items())]
    sizes = {rank.name: rank.facts["size"] for rank in ranks}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        raise ConfigError(f"{folder} has files of different runs ({each}): remove those of the earlier one")
    return ranks


def missing(ranks: list[RankTrace]) -> list[int]:
    """Return the ranks without a file.

    >>> missing([RankTrace({"rank": 1, "size": 3}, [])])
    [0, 2]
    """
    return sorted(set(range(ranks[0].facts["size"])) - {rank.facts["rank"] for rank in ranks})


def merged(ranks: list[RankTrace]) -> dict[str, Any]:
    """Return the timeline of all ranks in Chrome's trace format: a process for each, times in microseconds since the
    first event.

    A rank's clock is set by its machine's clock when its recording begins: clocks of ranks on one machine agree within
    some microseconds, those on several machines as well as the machines' clocks.

    >>> rank = RankTrace({"rank": 0, "size": 1, "host": "a", "offset": 7, "tracks": {"0": "steps"}, "variables": {}},
    ...                  [{"ph": "X", "name": "step", "cat": "step", "ts": 5000, "dur": 2500, "tid": 0, "args": {}}])
    >>> merged([rank])["traceEvents"][-1]
    {'ph': 'X', 'name': 'step', 'cat': 'step', 'ts': 0.0, 'dur': 2.5, 'tid': 0, 'args': {}, 'pid': 0}
    """
    starts = [event["ts"] + rank.facts["offset"] for rank in ranks for event in rank.events]
    first = min(starts, default=0)
    events: list[Event] = []
    for rank in ranks:
        pid = rank.facts["rank"]
        names: list[tuple[str, int, dict[str, Any]]] = [
            ("process_name", 0, {"name": rank.name}),
            ("process_labels", 0, {"labels": rank.facts["host"]}),
            ("process_sort_index", 0, {"sort_index": pid}),
        ]
        for track, name in rank.facts["tracks"].items():
            if int(track) != COLLECTIVE_TRACK:  # asynchronous events are on a track of their own name
                names.append(("thread_name", int(track), {"name": name}))
                names.append(("thread_sort_index", int(track), {"sort_index": int(track)}))
        events += [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in names]
        events += [_placed(event, rank, first) for event in sorted(rank.events, key=lambda event: event["ts"])]
    keys = ("rank", "host", "engine", "variables", "waits")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "grace": __version__,
            "start": first,
            "ranks": [{key: rank.facts[key] for key in keys if key in rank.facts} for rank in ranks],
        },
    }


def _placed(event: Event, rank: RankTrace, first: int) -> Event:
    pid = rank.facts["rank"]
    event = {**event, "ts": (event["ts"] + rank.facts["offset"] - first) / 1000, "pid": pid}
    if "dur" in event:
        event["dur"] /= 1000
    if "id" in event:  # which are numbers within a rank
        event["id"] = f"{pid}.{event['id']}"
    return event


def save(ranks: list[RankTrace], path: Path) -> None:
    """Write the merged trace, compressed if the name ends in .gz.

    Raises:
        ConfigError: it cannot be written.
    """
    raw = json.dumps(merged(ranks), separators=(",", ":")).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
