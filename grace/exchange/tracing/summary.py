"""What a trace says: where a step's time goes, what each variable costs, and what each bucket waits for."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from grace.errors import ConfigError
from grace.exchange.tracing.timeline import Event, RankTrace

PHASES = ("compensate", "compress", "update", "decode")
WITHIN = {"sum rows": "compensate", "encode": "compress", "average": "decode"}
"""Phases that are counted as others: a bucket that is encoded in one pass is compensated and remembered meanwhile."""
"""Phases that are counted with another."""
BESIDE = "grace exchanges"
"""The thread whose work training does not wait for."""

Interval = tuple[float, float]


@dataclasses.dataclass
class VariableCost:
    """What a variable costs, per step, on average over steps and ranks.

    Attributes:
        name: of the variable or part.
        shape: its shape.
        method: its compressor.
        calls: of the compressor.
        ms: milliseconds per phase: compensate, compress, update, decode.
        nbytes: of payload.
    """

    name: str
    shape: tuple[int, ...]
    method: str
    calls: float = 0.0
    ms: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    nbytes: float = 0.0

    @property
    def total(self) -> float:
        """Milliseconds, all phases."""
        return sum(self.ms.values())


@dataclasses.dataclass
class GroupCost:
    """What a bucket's collectives cost, likewise.

    Attributes:
        variables: the first and the last.
        communicator: communicator, method and memory.
        collectives: how many.
        nbytes: of buffers handed to the engine.
        packing: milliseconds to put payloads into buffers, take them out, and add them up.
        under_way: milliseconds from their start until they were known to be done.
        waited: milliseconds that training stood still for them.
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
    """A trace, in numbers; times in milliseconds per step, on average over steps and ranks.

    Attributes:
        ranks: how many.
        steps: of each (of the one that recorded most).
        step: the whole step.
        parts: what it is made of, by the keys of ``WORDS``; they add up to ``step``.
        under_way: how long any collective was under way.
        variables: by their total time, the largest first.
        buckets: by the time waited, then under way.
        waits: who waits for collectives, if Grace does not: then "rest" holds the time waited.
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
    def words(self) -> dict[str, str]:
        """What each part is."""
        rest = ["waiting for other stages"] if "stage" in self.parts else ["forward", "backward"]
        if "optimizer" not in self.parts:
            rest.append("the update")
        if self.waits:
            rest.append(f"waiting in {self.waits}")
        return {**WORDS, "rest": f"{', '.join(rest)} and the rest"}

    def sentence(self) -> str:
        """What dominates.

        >>> parts = {"rest": 2.0, "codec": 1.5, "wait": 6.0, "optimizer": 0.5}
        >>> print(Summary(2, 50, 10.0, parts, 8.0, [], []).sentence())
        60 % of a step is waiting for other ranks and the network; 20 % forward, backward and the rest; 15 %
        compressing and decoding; 5 % the optimizer's update.
        """
        shares = {part: 100 * ms / self.step for part, ms in self.parts.items()}
        first, *others = [part for part in sorted(shares, key=lambda part: -shares[part]) if shares[part] >= 0.5]
        said = [f"{shares[first]:.0f} % of a step is {self.words[first]}"]
        said += [f"{shares[part]:.0f} % {self.words[part]}" for part in others]
        return "; ".join(said) + "."


WORDS = {
    "stage": "forward and backward of the rank's stages",
    "codec": "compressing and decoding",
    "wait": "waiting for other ranks and the network",
    "optimizer": "the optimizer's update",
}


def summarize(ranks: Sequence[RankTrace]) -> Summary:
    """The numbers of a trace. Only what lies in steps that were recorded whole is counted.

    Raises:
        ConfigError: there are none.
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
    beside = _beside(rank)
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
    """What a rank's steps are made of, in nanoseconds. Where phases of several threads overlap, the codec's come first,
    then the optimizer's, then waiting."""
    beside = _beside(rank)
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
        parts[kind], before = covered - before, covered
    rest = total - before
    for kind in ("optimizer", "stage"):
        if not spans[kind]:
            del parts[kind]
    if "waits" in rank.facts:
        rest += parts.pop("wait")
    return {"step": total, "under way": length(collectives), "rest": rest, **parts}


def length(intervals: Iterable[Interval]) -> float:
    """Of the union of intervals.

    >>> length([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, end = 0.0, -math.inf
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _counted(rank: RankTrace) -> Iterator[Event]:
    """The events from the first whole step to the last, in order."""
    first, last = rank.steps[0]["ts"], rank.steps[-1]["ts"] + rank.steps[-1]["dur"]
    return (event for event in sorted(rank.events, key=lambda event: event["ts"]) if first <= event["ts"] <= last)


def _beside(rank: RankTrace) -> set[int]:
    """The tracks of threads that training does not wait for."""
    return {int(track) for track, name in rank.facts["tracks"].items() if name == BESIDE}
