"""Summary of a trace: the parts of a step's time, and the costs of each variable and each bucket."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from grace.errors import ConfigError
from grace.exchange.tracing.timeline import Event, RankTrace

PHASES = ("compensate", "compress", "update", "decode")
WITHIN = {"sum rows": "compensate", "encode": "compress", "average": "decode"}
"""Phases that are counted as another: encoding in one pass includes compensation and the memory's update."""
BACKGROUND_THREAD = "grace exchanges"
"""Name of the thread that training does not wait for."""

Interval = tuple[float, float]


@dataclasses.dataclass
class VariableCost:
    """Cost of a variable per step, averaged over steps and ranks.

    Attributes:
        name: name of the variable or shard.
        shape: its shape.
        method: spec of its compressor.
        calls: number of calls of the compressor.
        ms: milliseconds per phase: compensate, compress, update, decode.
        nbytes: bytes of payload.
    """

    name: str
    shape: tuple[int, ...]
    method: str
    calls: float = 0.0
    ms: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    nbytes: float = 0.0

    @property
    def total(self) -> float:
        """Milliseconds of all phases."""
        return sum(self.ms.values())


@dataclasses.dataclass
class GroupCost:
    """Cost of a bucket's collectives per step, averaged over steps and ranks.

    Attributes:
        variables: names of the first and the last variable.
        communicator: specs of communicator, method and memory.
        collectives: number of collectives.
        nbytes: bytes of buffers passed to the engine.
        packing: milliseconds to pack, unpack and add up payloads.
        under_way: milliseconds from the start of collectives until they were known to be done.
        waited: milliseconds that training waited for them.
    """

    variables: str
    communicator: str
    collectives: float = 0.0
    nbytes: float = 0.0
    packing: float = 0.0
    under_way: float = 0.0
    waited: float = 0.0


@dataclasses.dataclass
class Summary:
    """Numbers of a trace; times are milliseconds per step, averaged over steps and ranks.

    Attributes:
        ranks: number of ranks.
        steps: number of steps of the rank that recorded most.
        step: time of the whole step.
        parts: times of the step's parts, by the keys of ``WORDS``; their sum is ``step``.
        under_way: time in which any collective was under way.
        variables: costs of variables, the largest total time first.
        buckets: costs of buckets, by the time waited, then under way.
        waits: name of the library that waits for collectives, if Grace does not: "rest" then includes that time.
    """

    ranks: int
    steps: int
    step: float
    parts: dict[str, float]
    under_way: float
    variables: list[VariableCost]
    buckets: list[GroupCost]
    waits: str = ""

    @property
    def descriptions(self) -> dict[str, str]:
        """Descriptions of the parts, by key."""
        rest = ["waiting for other stages"] if "stage" in self.parts else ["forward", "backward"]
        if "optimizer" not in self.parts:
            rest.append("the update")
        if self.waits:
            rest.append(f"waiting in {self.waits}")
        return {**WORDS, "rest": f"{', '.join(rest)} and the rest"}

    def sentence(self) -> str:
        """Return a sentence about the largest parts.

        >>> parts = {"rest": 2.0, "codec": 1.5, "wait": 6.0, "optimizer": 0.5}
        >>> print(Summary(2, 50, 10.0, parts, 8.0, [], []).sentence())
        60 % of a step is waiting for other ranks and the network; 20 % forward, backward and the rest; 15 %
        compressing and decoding; 5 % the optimizer's update.
        """
        shares = {part: 100 * ms / self.step for part, ms in self.parts.items()}
        first, *others = [part for part in sorted(shares, key=lambda part: -shares[part]) if shares[part] >= 0.5]
        said = [f"{shares[first]:.0f} % of a step is {self.descriptions[first]}"]
        said += [f"{shares[part]:.0f} % {self.descriptions[part]}" for part in others]
        return "; ".join(said) + "."


WORDS = {
    "stage": "forward and backward of the rank's stages",
    "codec": "compressing and decoding",
    "wait": "waiting for other ranks and the network",
    "optimizer": "the optimizer's update",
}


def summarize(ranks: Sequence[RankTrace]) -> Summary:
    """Return the summary of a trace. Only events in completely recorded steps are counted.

    Raises:
        ConfigError: there are no such steps.
    """
    count = sum(len(rank.steps) for rank in ranks)
    if not count:
        raise ConfigError(
            "no step was recorded: the program made no more steps than are left out at the beginning (--skip, or "
            "GRACE_TRACE_SKIP), or exchanged no gradients"
        )
    variables: dict[str, VariableCost] = {}
    buckets: dict[tuple[str, str], GroupCost] = {}
    parts: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for name, facts in rank.facts["variables"].items():
            variables.setdefault(name, VariableCost(name, tuple(facts["shape"]), facts["method"]))
        if rank.steps:
            _add_costs(rank, count, variables, buckets)
            for part, ns in _parts(rank).items():
                parts[part] += ns / 1e6 / count
    return Summary(
        ranks=len(ranks),
        steps=max(len(rank.steps) for rank in ranks),
        step=parts.pop("step"),
        under_way=parts.pop("under way"),
        parts=dict(parts),
        variables=sorted(variables.values(), key=lambda cost: -cost.total),
        buckets=sorted(buckets.values(), key=lambda bucket: (-bucket.waited, -bucket.under_way)),
        waits=next((rank.facts["waits"] for rank in ranks if "waits" in rank.facts), ""),
    )


def _add_costs(
    rank: RankTrace, count: int, variables: dict[str, VariableCost], buckets: dict[tuple[str, str], GroupCost]
) -> None:
    """Add a rank's events to the costs of variables and buckets, divided by the number of all steps."""
    beside = _background_tracks(rank)
    begun: dict[int, tuple[GroupCost, int]] = {}
    for event in _counted(rank):
        args, name, ms = event.get("args", {}), event["name"], event.get("dur", 0) / 1e6 / count
        phase = WITHIN.get(name, name)
        if name == "payload":
            for variable, nbytes in args.items():
                variables[variable].nbytes += nbytes / count
        elif phase in PHASES:
            variables[args["variable"]].ms[phase] += ms
            variables[args["variable"]].calls += (phase == "compress") / count
        elif event["ph"] == "e":
            bucket, start = begun.pop(event["id"], (None, 0))
            if bucket is not None:
                bucket.under_way += (event["ts"] - start) / 1e6 / count
        elif "communicator" in args:
            key = args["variables"], args["communicator"]
            bucket = buckets.setdefault(key, GroupCost(*key))
            if event["ph"] == "b":
                begun[event["id"]] = bucket, event["ts"]
                bucket.collectives += 1 / count
                bucket.nbytes += args["bytes"] / count
            elif event["cat"] == "codec":
                bucket.packing += ms
            elif event["tid"] not in beside:
                bucket.waited += ms


def _parts(rank: RankTrace) -> dict[str, float]:
    """Return the parts of a rank's steps, in nanoseconds. Overlapping phases of several threads are counted once: as
    codec first, then as optimizer, then as waiting."""
    beside = _background_tracks(rank)
    spans: dict[str, list[Interval]] = {"codec": [], "optimizer": [], "wait": [], "stage": []}
    collectives: list[Interval] = []
    begun: dict[int, float] = {}
    for event in _counted(rank):
        if event["ph"] == "b":
            begun[event["id"]] = event["ts"]
        elif event["ph"] == "e" and event["id"] in begun:
            collectives.append((begun.pop(event["id"]), event["ts"]))
        elif event["cat"] in spans and event["ph"] == "X" and event["tid"] not in beside:
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    total = float(sum(step["dur"] for step in rank.steps))
    parts, together, before = {}, [], 0.0
    for kind, intervals in spans.items():
        together += intervals
        covered = length(together)
        parts[kind] = covered - before  # the part that no earlier kind covers
        before = covered
    rest = total - before
    for kind in ("optimizer", "stage"):
        if not spans[kind]:
            del parts[kind]
    if "waits" in rank.facts:
        rest += parts.pop("wait")
    return {"step": total, "under way": length(collectives), "rest": rest, **parts}


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals.

    >>> length([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, end = 0.0, -math.inf
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _counted(rank: RankTrace) -> Iterator[Event]:
    """Return the events from the first completely recorded step to the last, in order."""
    first, last = rank.steps[0]["ts"], rank.steps[-1]["ts"] + rank.steps[-1]["dur"]
    return (event for event in sorted(rank.events, key=lambda event: event["ts"]) if first <= event["ts"] <= last)


def _background_tracks(rank: RankTrace) -> set[int]:
    """Return the tracks of threads that training does not wait for."""
    return {int(track) for track, name in rank.facts["tracks"].items() if name == BACKGROUND_THREAD}
