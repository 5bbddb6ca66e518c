"""Costs of a step that do not depend on bytes: Grace's optimizer on a small network, and on many small variables:
``python -m benchmarks.fixed_costs``.

Ranks over gloo on loopback, one thread each. The contestants take turns in blocks of steps, all in one run. Two
tables of rank 0's medians:

small network: a step of an MLP of 19,450 parameters. "CPU" is the time of the main thread in a step, without its waits
for the other ranks, and "beside the step" is that less torch's own step without communication: the cost of the
exchange's Python. "step" is wall time, waits included.

many variables: a step of 1,000 variables beside one of a single variable of as many elements, and their ratio, in wall
time; also the CPU time beside torch's own step, and codec and memory alone, with a copy_ of all elements.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import nn

from grace.bench.common.options import methods as listed
from grace.bench.common.results import machine, versions
from grace.bench.common.text import UNKNOWN
from grace.bench.ranks.rank_program import join_run
from grace.bench.ranks.scenario import run_scenario
from grace.bench.step.contestants import Contestant, Stepper, bound, in_optimizer, torch_baselines
from grace.bench.step.step_settings import StepSettings
from grace.core.atomic_files import atomic_write
from grace.core.backend import Backend
from grace.errors import GraceError

METHODS = "none,topk(ratio=0.01),qsgd,powersgd(rank=4)"
WIDTHS = (64, 128, 80, 10)
BATCH = 16
WARMING = 5
"""Steps before anything is timed: DDP rebuilds its buckets after the first, Grace chooses its codecs in it."""
SMALL, MANY, ONE, COPY = "small network", "many variables", "one variable", "copy_"

Row = dict[str, Any]


class Variables(nn.Module):
    """Model of variables of equal sizes, whose gradients cost next to nothing to compute.

    Args:
        count: the number of variables.
        elements: the number of elements of each.
    """

    def __init__(self, count: int, elements: int):
        super().__init__()
        self.own = nn.ParameterList([nn.Parameter(torch.randn(elements)) for _ in range(count)])

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.own)).square().mean()


def small_network(rank: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return an MLP, and its loss on a batch of this rank's."""
    layers = [nn.Linear(n, m) for n, m in itertools.pairwise(WIDTHS)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), *layers[2:])
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(BATCH, WIDTHS[0], generator=generator), torch.randn(BATCH, WIDTHS[-1], generator=generator)
    return model, lambda model: nn.functional.mse_loss(model(x), y)


class Measured:
    """Contestant with the times of its steps: wall seconds, and seconds of the main thread and of the codec."""

    def __init__(self, contestant: Contestant, model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]):
        self.stepper = Stepper(contestant, model, loss)
        self.times: list[tuple[float, float, float]] = []

    def steps(self, count: int, record: bool = True) -> None:
        """Make some steps, and record their times."""
        traffic = self.stepper.traffic
        for _ in range(count):
            codec = traffic.codec_seconds if traffic else 0.0
            began, cpu = time.perf_counter(), time.thread_time()
            self.stepper()
            cpu, seconds = time.thread_time() - cpu, time.perf_counter() - began
            if record:
                self.times.append((seconds, cpu, traffic.codec_seconds - codec if traffic else 0.0))

    def row(self) -> Row:
        """Return medians, and the least times, in microseconds."""
        columns = dict(zip(("step", "cpu", "codec"), zip(*self.times, strict=True), strict=True))
        if self.stepper.traffic is None:
            del columns["codec"]
        medians = {f"{key}_us": 1e6 * statistics.median(column) for key, column in columns.items()}
        return {**medians, **{f"least_{key}_us": 1e6 * min(column) for key, column in columns.items()}}


def measure(settings: dict[str, Any], backend: Backend) -> list[Row]:
    """Let the contestants take turns, and return a row for each in each case; every rank makes the same calls.

    Args:
        settings: the arguments of the command line.
        backend: the run that this rank has joined.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count, elements = settings["variables"], settings["elements"]
    cases = [
        (SMALL, *small_network(backend.rank), settings["steps"]),
        (MANY, Variables(count, elements), _own_loss, max(1, settings["steps"] // 10)),
        (ONE, Variables(1, count * elements), _own_loss, max(1, settings["steps"] // 10)),
    ]
    contestants = [bound(), *(torch_baselines()[:1] if backend.name == "torch" else [])]
    contestants += [in_optimizer(spec, spec, compressor=spec) for spec in settings["methods"]]
    rows: list[Row] = []
    for case, model, loss, steps in cases:
        measured = [Measured(contestant, model, loss) for contestant in contestants]
        for one in measured:
            one.steps(WARMING, record=False)
        for _ in range(settings["rounds"]):
            for one in measured:
                backend.allgather_object(None)  # a barrier: the former contestant's collectives are done on all ranks
                one.steps(steps)
        numel = sum(p.numel() for p in model.parameters())
        rows += [
            {"case": case, "elements": numel, "name": one.stepper.contestant.name, **one.row()} for one in measured
        ]
    rows.append({"case": COPY, "elements": count * elements, "name": COPY, "step_us": _copy(count * elements)})
    return rows


def _own_loss(model: nn.Module) -> torch.Tensor:
    return model()  # type: ignore[no-any-return]


def _copy(elements: int) -> float:
    """Return the median microseconds of a ``copy_`` of so many float32s."""
    source = torch.randn(elements)
    target = torch.empty(elements)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        target.copy_(source)
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times)


def small_table(rows: Sequence[Row], ranks: int) -> Table:
    """Return the table of the small network."""
    found = [row for row in rows if row["case"] == SMALL]
    alone = found[0]
    title = f"{found[0]['elements']:,} parameters, {ranks} rank{'s' * (ranks > 1)}: microseconds a step, medians"
    table = Table(Column("method", no_wrap=True), "step", "CPU", "CPU beside the step", "codec", title=title)
    for row in found:
        beside = row["cpu_us"] - alone["cpu_us"]
        codec = f"{row['codec_us']:,.0f}" if "codec_us" in row else ""
        table.add_row(row["name"], f"{row['step_us']:,.0f}", f"{row['cpu_us']:,.0f}", f"{beside:,.0f}", codec)
    return table


def many_table(rows: Sequence[Row], variables: int) -> Table:
    """Return the table of many variables beside one."""
    many, one = ({row["name"]: row for row in rows if row["case"] == case} for case in (MANY, ONE))
    (copy,) = (row for row in rows if row["case"] == COPY)
    alone = next(iter(many))
    title = (
        f"{variables:,} variables beside one of {copy['elements']:,} elements: ms a step, medians; "
        f"a copy_ takes {copy['step_us'] / 1e3:.2f}"
    )
    heads = [head for what in ("step", "CPU beside", "codec") for head in (f"{what}: many, one", "ratio")]
    table = Table(Column("method", no_wrap=True), *heads, title=title)
    for name in many:
        cells = list[str]()
        for key in ("step_us", "cpu_us", "codec_us"):
            if key not in many[name] or (key == "cpu_us" and name == alone):
                cells += ["", ""]
                continue
            less = (many[alone][key], one[alone][key]) if key == "cpu_us" else (0.0, 0.0)
            a, b = (many[name][key] - less[0]) / 1e3, (one[name][key] - less[1]) / 1e3
            cells += [f"{a:.2f}, {b:.2f}", f"{a / b:.1f}" if b > 0 else UNKNOWN]
        table.add_row(name, *cells)
    return table


def run(settings: dict[str, Any]) -> list[Row]:
    """Start the ranks, and return rank 0's rows."""
    rows: list[Row] = run_scenario([__file__], settings, [], settings["ranks"], None, lambda event: None)["rows"]
    return rows


def main() -> None:
    """Measure, print two tables, and write a file if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS, help=f"compressors, separated by commas (default: {METHODS})")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine (default: 2)")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of each contestant (default: 8)")
    parser.add_argument(
        "--steps", type=int, default=100, help="in a block of the small network; a tenth in the others (default: 100)"
    )
    parser.add_argument("--variables", type=int, default=1000, help="many variables are so many (default: 1000)")
    parser.add_argument("--elements", type=int, default=1000, help="of each of many variables (default: 1000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all medians and least times there as well")
    parser.add_argument("folder", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:  # this is a rank
        with join_run(arguments.folder, dict[str, Any]) as (settings, backend, emit):
            emit({"scenario": {"rows": measure(settings, backend)}})
        return
    for name in ("steps", "variables", "elements"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(arguments, name)}")
    settings = {key: value for key, value in vars(arguments).items() if key not in ("json", "folder")}
    try:
        settings["methods"] = listed(arguments.methods)
        StepSettings(methods=settings["methods"], ranks=[arguments.ranks], rounds=arguments.rounds)  # checks them
        rows = run(settings)
    except GraceError as error:
        parser.error(str(error))
    if arguments.json is not None:
        facts = {"settings": settings, "machine": machine(), "versions": versions(), "rows": rows}
        with atomic_write(arguments.json) as draft:
            draft.write_text(json.dumps(facts, indent=1), encoding="utf-8")
    console = Console(width=None if Console().is_terminal else 120)
    console.print(small_table(rows, arguments.ranks))
    console.print(many_table(rows, arguments.variables))


if __name__ == "__main__":
    main()
