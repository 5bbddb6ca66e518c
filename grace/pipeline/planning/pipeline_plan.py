"""The plan of a pipeline: nodes and ranks of each stage, and the predicted seconds and memory of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grace.core import documents
from grace.core.quantities import align_columns, show_bytes, show_ms
from grace.core.schema_words import read_record
from grace.core.version import __version__
from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.schedules import schedule_error

VERSION = 1
HEADINGS = ("stage", "nodes", "ranks", "ms", "exchange", "weights", "sends", "memory")
"""Headings of a stage's cells."""
LEGEND = "ms: forward + backward of a micro-batch on a rank; exchange: of gradients, in ms; sends: for a micro-batch"


@dataclass(frozen=True)
class Stage:
    """One stage, with the predicted seconds and bytes of a rank that has it.

    Attributes:
        nodes: names of the nodes, in the graph's order.
        ranks: ranks that have the stage, one for each replica.
        sends: names of the values that it sends to the next stage.
        forward: seconds of forward for a replica's rows of one micro-batch.
        backward: seconds of backward for these rows, including recomputation if the plan recomputes.
        crossing: seconds of sending ``sends`` to the next stage, for a micro-batch.
        returning: seconds of sending their gradients back.
        sent: bytes of ``sends`` for the rows of a micro-batch of all replicas.
        returned: bytes of the gradients that come back for them.
        parameters: bytes of parameters, frozen ones and buffers included.
        exchange: seconds of the gradients' exchange over the replicas, and before it over tied copies; hidden or not.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    sends: tuple[str, ...] = ()
    forward: float = 0.0
    backward: float = 0.0
    crossing: float = 0.0
    returning: float = 0.0
    sent: float = 0.0
    returned: float = 0.0
    parameters: float = 0.0
    exchange: float = 0.0

    @property
    def replicas(self) -> int:
        """Number of ranks that have the stage."""
        return len(self.ranks)


@dataclass(frozen=True)
class PipelinePlan:
    """A pipeline.

    Attributes:
        model: digest of the graph's structure (:attr:`grace.pipeline.planning.graph.Graph.key`).
        stages: the stages, in order.
        batch: rows of a step, of all replicas.
        microbatches: number of micro-batches of a batch; replica r of R has rows [r M/R, (r+1) M/R) of each of M rows.
        schedule: one of :data:`~grace.pipeline.planning.schedules.SCHEDULES`.
        recompute: True if only the values that enter a stage are kept, and backward computes the stage's forward again.
        layout: "replicas" if replicas of a stage are neighbours in the order of ranks, "stages" if stages are.
        compressor: spec of the gradients' compressor.
        seconds: seconds of a step.
        bubble: share of the schedule in which ranks do not compute, on average.
        exposed: seconds of the exchange that are not hidden by computation.
        memory: bytes on each rank.
        limit: bytes of a device; None if no limit was given.
        versions: versions of the plan's form and of the packages that wrote it.

    >>> plan = PipelinePlan("k", (Stage(("a",), (0, 1)), Stage(("b",), (2,))), batch=8, microbatches=4)
    >>> plan.world_size, plan.replicas, plan.stage_and_replica(1), PipelinePlan.from_dict(plan.to_dict()) == plan
    (3, (2, 1), (0, 1), True)
    """

    model: str
    stages: tuple[Stage, ...]
    batch: int
    microbatches: int
    schedule: str = "1f1b"
    recompute: bool = False
    layout: str = "replicas"
    compressor: str = "none"
    seconds: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    memory: tuple[float, ...] = ()
    limit: float | None = None
    versions: Mapping[str, object] = field(default_factory=lambda: {"plan": VERSION, "grace": __version__})

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a plan has at least one stage")
        error = schedule_error(self.schedule, len(self.stages), self.microbatches)
        if error:
            raise ConfigError(error)
        if not (self.batch >= 1 and self.microbatches >= 1) or self.batch % self.microbatches:
            raise ConfigError(f"{self.microbatches} micro-batches do not divide a batch of {self.batch} rows")
        rows = self.batch // self.microbatches
        for i, stage in enumerate(self.stages):
            if not stage.nodes:
                raise ConfigError(f"stage {i} has no nodes")
            if not stage.ranks or len(set(stage.ranks)) < len(stage.ranks):
                raise ConfigError(f"stage {i} needs ranks, each once, and has {list(stage.ranks)}")
            if rows % stage.replicas:
                raise ConfigError(f"the {stage.replicas} replicas of stage {i} do not divide {rows} rows")
        ranks = sorted(rank for stage in self.stages for rank in stage.ranks)
        if ranks != list(range(len(ranks))):
            raise ConfigError(f"a plan's ranks must be 0 to N - 1, each in one stage, and these are {ranks}")

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return sum(self.replicas)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    def stage_and_replica(self, rank: int) -> tuple[int, int]:
        """Return (stage, replica) of a rank."""
        return next((i, stage.ranks.index(rank)) for i, stage in enumerate(self.stages) if rank in stage.ranks)

    def check(self, graph: Graph, ranks: int, versions: Mapping[str, object] | None = None) -> None:
        """Raise ConfigError if the plan is for another model, number of ranks, or versions of packages. The message
        names the difference."""
        if self.model != graph.key:
            raise ConfigError(
                f"the plan is for another model ({self.model[:12]}, and this one is {graph.key[:12]}): plan again"
            )
        if self.world_size != ranks:
            raise ConfigError(f"the plan is for {self.world_size} ranks, and there are {ranks}: plan again")
        for name, version in (versions or {}).items():
            if self.versions.get(name, version) != version:  # torch may name the nodes otherwise
                raise ConfigError(f"the plan is of {name} {self.versions[name]}, and this is {version}: plan again")
        sends = graph.passed_on([stage.nodes for stage in self.stages])
        for i, (stage, names) in enumerate(zip(self.stages, [*sends, ()], strict=True)):
            if stage.sends != names:
                raise ConfigError(
                    f"stage {i} of the plan sends {list(stage.sends)}, and later stages read {list(names)}"
                )

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a JSON document."""
        return documents.to_plain(self)

    @classmethod
    def from_dict(cls, document: object, source: str = "the plan") -> "PipelinePlan":
        """Return the plan of a JSON document. A ConfigError names the field that is wrong, as another version."""
        if not isinstance(document, dict):
            raise ConfigError(f"{source} is no plan of a pipeline: it must be an object")
        versions = document.get("versions")
        version = versions.get("plan") if isinstance(versions, dict) else None
        if version != VERSION:
            raise ConfigError(f"{source} is no plan of version {VERSION} (its version is {version!r}): plan again")
        return read_record(cls, document, source)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, as JSON."""
        documents.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "PipelinePlan":
        """Return the plan in a file; raise ConfigError if it has none."""
        return cls.from_dict(documents.parse(documents.read(Path(path)), str(path), only_json=True), str(path))

    def cells(self) -> list[tuple[str, ...]]:
        """Return the stages as text, under :data:`HEADINGS`."""
        rows = list[tuple[str, ...]]()
        for i, stage in enumerate(self.stages):
            ends = stage.nodes[0] if len(stage.nodes) == 1 else f"{stage.nodes[0]} .. {stage.nodes[-1]}"
            seconds = stage.forward, stage.backward, stage.exchange
            forward, backward, exchange = (show_ms(one).removesuffix(" ms") for one in seconds)
            sent, returned, weights = (show_bytes(one, 3) for one in (stage.sent, stage.returned, stage.parameters))
            sends = f"{sent}, {returned} back" if i + 1 < len(self.stages) else ""
            memory = show_bytes(self.memory[stage.ranks[0]], 3) if self.memory else ""
            ranks = ", ".join(map(str, stage.ranks))
            nodes = f"{ends} ({len(stage.nodes)})"
            rows.append((str(i), nodes, ranks, f"{forward} + {backward}", exchange, weights, sends, memory))
        return rows

    def __str__(self) -> str:
        """Return the plan as a table."""
        return "\n".join([*align_columns([HEADINGS, *self.cells()]), LEGEND, self.summary])

    @property
    def summary(self) -> str:
        """Line with the schedule, the step's seconds, bubble and exchange, and the fullest rank's memory."""
        again = ", computing forward again" if self.recompute else ""
        limit = "" if self.limit is None else f" of {show_bytes(self.limit)}"
        full = f"; the fullest rank has {show_bytes(max(self.memory))}{limit}" if self.memory else ""
        return (
            f"{self.schedule}, {self.microbatches} micro-batches of {self.batch // self.microbatches} rows{again}: "
            f"{1e3 * self.seconds:.3f} ms a step, bubble {100 * self.bubble:.1f} %, exchange not hidden "
            f"{1e3 * self.exposed:.3f} ms (gradients: {self.compressor}){full}"
        )
