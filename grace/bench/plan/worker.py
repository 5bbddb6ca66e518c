"""One rank of ``grace bench plan``.

Usage: python -m grace.bench.plan.worker FOLDER MODEL, where FOLDER holds settings.json; rank 0 writes events.jsonl:

    {"blocks": n}           how many blocks of steps follow
    {"times_ms"}            a block
    {"scenario": {...}}     all of it: facts, and plans with what was predicted and measured
"""

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import grace
from grace.bench.plan.settings import MIXED, SCATTERED, Event, Settings
from grace.bench.ranks.run import as_rank, join_run
from grace.bench.workloads.models import workload
from grace.core.backend import Backend
from grace.core.registry import make
from grace.errors import ConfigError, ExchangeError
from grace.planner.clock import undisturbed
from grace.planner.driver import ROUNDS as TRIED
from grace.planner.explain import lost, plan_of
from grace.planner.grouped import grouped
from grace.planner.planning import Planning, measured_step
from grace.planner.problem import Problem
from grace.planner.quality import SLACK, allows, class_of
from grace.planner.search import Candidate
from grace.strategy.plan import Strategy

LR = 1e-4
SLOW, VERY_SLOW = 0.7, 2.0
"""Seconds of a step from which on fewer are made: what disturbs them is short beside them."""
MOST = 10
"""Steps of a block."""
Trial = tuple[str, Strategy]


class Trainer:
    """A model that trains, and the planner that has measured its steps.

    Args:
        settings: what to run.
        model: its name.
        backend: the run that this rank has joined.
    """

    def __init__(self, settings: Settings, model: str, backend: Backend):
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        torch.manual_seed(0)
        work = workload(model, backend.rank)
        self.model, self.loss, self.backend, self.settings = work.model, work.loss, backend, settings
        plain = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.optimizer = grace.DistributedOptimizer(plain, self.model, strategy="auto")
        self.session: Any = self.optimizer._grace

    def step(self) -> float:
        """Make one; returns its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss(self.model).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        return float(max(self.backend.allgather_object(seconds)))

    def planned(self) -> Planning:
        """Train as ``strategy="auto"`` does until it would try candidates; returns what it has found by then."""
        auto = self.session.auto
        planning: Planning = auto.planner
        planning.shares = self.settings.seconds[:2]
        planning.beside = [f"scatter_reduce, {make('compressor', SCATTERED).spec}, none"]
        if self.slowest(self.step()) > VERY_SLOW:
            auto.held_steps, auto.plain_steps = 3, 2  # of which one and one count
            auto.then()
        while auto.left and not auto.turns:
            self.step()
        if not auto.turns:
            raise ExchangeError("nothing was planned; rank 0 has said why")
        auto.left = 0
        return planning


def measure(settings: Settings, model: str, backend: Backend, emit: Callable[[Event], None]) -> None:
    """Let ``auto`` measure and plan, then measure plans in turns; rank 0 calls ``emit`` with each event.

    Raises:
        ConfigError: nothing can be planned here.
        ExchangeError: the engine failed, or planning did.
    """
    began = time.perf_counter()
    trainer = Trainer(settings, model, backend)
    planning = trainer.planned()
    candidates, missing = _plans(settings, planning) if backend.rank == 0 else ([], {})
    trials: list[Trial] = backend.allgather_object([(one.name, one.strategy) for one in candidates])[0]
    expected: list[float] = backend.allgather_object([one.prediction.step for one in candidates])[0]
    prepared = time.perf_counter() - began
    runs = _runs(trainer, trials, expected)
    blocks = _turns(runs, trainer, emit)
    if backend.rank == 0:
        emit({"scenario": _document(planning, candidates, missing, blocks, prepared, time.perf_counter() - began)})


def _plans(settings: Settings, planning: Planning) -> tuple[list[Candidate], dict[str, str]]:
    """What is measured, plain sums first, and what cannot be predicted, and why."""
    problem = planning.problem
    assert problem is not None
    variables, ranks, nodes = problem.variables, problem.cluster.world_size, len(set(problem.cluster.ranks))
    made = {"none": lambda: grouped(variables, ranks, nodes=nodes)}
    for method in settings.methods:
        made[method] = lambda method=method: grouped(variables, ranks, method, nodes=nodes)  # type: ignore[misc]
    made[f"{SCATTERED}, scatter_reduce"] = lambda: grouped(
        variables, ranks, SCATTERED, None, "scatter_reduce", nodes=nodes
    )
    mixed = f"size_threshold(compressor={MIXED})"
    made[mixed] = lambda: make("builder", mixed).build(variables, problem.cluster)
    found, missing = list[Candidate](), dict[str, str]()
    for name, strategy in made.items():
        try:
            found.append(_candidate(name, strategy(), problem))
        except ConfigError as error:
            missing[name] = str(error)
    own = [one for one in planning.found if not one.baseline and (one.name not in made)]
    chosen = plan_of(problem, planning.found).chosen
    for one in [*own[: settings.own], chosen]:
        if all(one.strategy.plans != other.strategy.plans for other in found):
            found.append(dataclasses.replace(one, name=f"planned: {one.name} ({len(found)})"))
    return found, missing


def _candidate(name: str, strategy: Strategy, problem: Problem) -> Candidate:
    methods = tuple({part.compressor: None for plan in strategy.plans for part in plan.parts})
    return Candidate(name, strategy, problem.predict(strategy), lost(problem, strategy), None, name == "none", methods)


# -- steps ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Run:
    """A plan that is ready to train by.

    Attributes:
        take: goes on by it.
        seconds: about what a step takes.
        blocks: seconds of its steps on each rank, by block and rank.
        codec, sent: on rank 0, seconds and bytes per step, by block.
    """

    take: Callable[[], None]
    seconds: float
    blocks: list[list[list[float]]] = dataclasses.field(default_factory=list)
    codec: list[float] = dataclasses.field(default_factory=list)
    sent: list[float] = dataclasses.field(default_factory=list)


def _runs(trainer: Trainer, trials: Sequence[Trial], expected: Sequence[float]) -> list[Run]:
    """A runner for each, so that each remembers its own residuals; all have made their first steps."""
    session, found = trainer.session, list[Run]()
    for number, ((_, strategy), seconds) in enumerate(zip(trials, expected, strict=True)):
        runner, plan = session.runner, session.plan
        if number:  # the first is what the run has begun with
            runner, plan = session.build_runner(strategy)
        found.append(Run(lambda e=runner, p=plan: session.switch_runner(e, p), seconds))  # type: ignore[misc]
    for run in found[1:]:
        run.take()
        took = [trainer.step() for _ in range(1 if run.seconds > SLOW else 2)]
        run.seconds = trainer.slowest(took[-1])
    return found


def _turns(runs: Sequence[Run], trainer: Trainer, emit: Callable[[Event], None]) -> list[Run]:
    """Measure them in turns, one round after the other, backwards in every other one."""
    rounds, budget = trainer.settings.rounds, trainer.settings.seconds[2]
    emit({"blocks": rounds * len(runs)})
    for number in range(rounds):
        for run in runs if number % 2 == 0 else runs[::-1]:
            if number * run.seconds > max(budget, SLOW):  # it has had its share
                continue
            run.take()
            settling = run.seconds < SLOW / 2
            steps = min(MOST, max(1, round(budget / rounds / run.seconds)))
            _block(run, trainer, settling, steps)
            emit({"times_ms": [1e3 * s for s in run.blocks[-1][0]]})
    return list(runs)


def _block(run: Run, trainer: Trainer, settling: bool, steps: int) -> None:
    for _ in range(settling):
        trainer.step()
    trainer.backend.allgather_object(None)  # nobody starts before what came earlier is done
    traffic = trainer.session.runner.traffic
    codec, sent = traffic.codec_seconds, traffic.sent_bytes
    took = [trainer.step() for _ in range(steps)]
    run.codec.append((traffic.codec_seconds - codec) / steps)
    run.sent.append((traffic.sent_bytes - sent) / steps)
    run.blocks.append(trainer.backend.allgather_object(took))


# -- what rank 0 tells ---------------------------------------------------------------------------------


def _document(
    planning: Planning,
    candidates: Sequence[Candidate],
    missing: dict[str, str],
    runs: Sequence[Run],
    prepared: float,
    seconds: float,
) -> Event:
    problem, calibration = planning.problem, planning.calibration
    assert problem is not None
    assert calibration is not None
    tried = {one.strategy.plans for one in planning.found}
    chosen = plan_of(problem, planning.found).chosen.strategy.plans
    plans = [
        {
            **_measured(run),
            "name": one.name,
            "predicted_ms": 1e3 * one.prediction.step,
            "compute_ms": 1e3 * one.prediction.compute,
            "codec_ms": 1e3 * one.prediction.codec,
            "exposed_ms": 1e3 * one.prediction.exposed,
            "predicted_bytes": one.prediction.sent,
            "allowed": _allowed(problem, one),
            "tried": one.strategy.plans in tried or one.name == "fp16",
            "chosen": one.strategy.plans == chosen,
            "strategy": one.strategy.to_dict(),
            "step": measured_step(problem, one, undisturbed(_slowest(run.blocks))).to_dict(),
        }
        for one, run in zip(candidates, runs, strict=True)
    ]
    return {
        "timeline": dataclasses.asdict(problem.timeline),
        "plain": planning.plain,
        "calibration": calibration.to_dict(),
        "prepared_seconds": prepared,
        "seconds": seconds,
        "missing": missing,
        "plans": plans,
    }


def _measured(run: Run) -> Event:
    """Milliseconds of the slowest rank: lower quartiles of all steps, and of as many rounds as ``auto`` tries."""
    return {
        "measured_ms": 1e3 * undisturbed(_slowest(run.blocks)),
        "first_ms": 1e3 * undisturbed(_slowest(run.blocks[:TRIED])),
        "measured_codec_ms": 1e3 * statistics.median(run.codec),
        "measured_bytes": statistics.median(run.sent),
        "times_ms": [1e3 * seconds for block in run.blocks for seconds in block[0]],
    }


def _slowest(blocks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Seconds of the rank whose steps are longest."""
    ranks = [[s for block in blocks for s in block[rank]] for rank in range(len(blocks[0]))]
    return max(ranks, key=undisturbed)


def _allowed(problem: Problem, one: Candidate) -> bool:
    """Whether ``auto`` could choose it: of its class, and within its budget of errors."""
    parts = {(part.compressor, part.memory) for plan in one.strategy.plans for part in plan.parts}
    fits = all(allows(problem.quality, class_of(compressor, memory)) for compressor, memory in parts)
    return fits and one.error <= problem.budget * SLACK


def main(folder: str, model: str) -> None:
    """Join the run, and measure."""
    os.environ["GRACE_CALIBRATION"] = str(Path(folder, "calibration.json"))  # which nobody has written
    with join_run(folder, Settings, "torch") as (settings, backend, emit):
        measure(settings, model, backend, emit)


if __name__ == "__main__":
    as_rank(main)
