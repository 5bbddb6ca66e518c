"""The plan that a pipeline runs by: the user's, or one that is searched for with facts of the optimizer."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from grace.errors import ConfigError
from grace.pipeline.planning.graph import Graph
from grace.pipeline.planning.pipeline_plan import PipelinePlan
from grace.pipeline.planning.search import SearchOptions, nearest_error, search_plan
from grace.planner.exchange_costs import Costs
from grace.planner.network import Links, Network
from grace.planner.step_timer import undisturbed
from grace.session.versions import public

DEFAULT_LINKS = Links(1.25e9, 50e-6)
"""10 Gbit/s: the network that is assumed if ``links`` is left out."""
SHARDING = ("deepspeed", "fairscale")
"""Packages with optimizers that spread their state over ranks. torch.distributed has such optimizers too."""
TIMED_ELEMENTS = 2**22
"""Number of elements of the parameter that an optimizer is timed with: 16 MB."""
MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""The user's ``optimizer=``."""


def search_plan_by_throughput(
    graph: Graph, ranks: int, rows: int, each: bool, links: Network | Costs | None, options: SearchOptions
) -> PipelinePlan:
    """Return the plan with the most rows per second, of an example of so many rows. With ``each`` these are one
    replica's, so that all stages have equally many replicas unless the user gives a number for each; else they are all
    replicas'. The network is :data:`DEFAULT_LINKS` if ``links`` is None. A ConfigError says why no plan fits."""
    by_stage = options.replicas_by_stage
    counts: list[int | None] = [None]
    if each and not by_stage:
        possible = options.replica_counts
        divisors = [r for r in range(1, ranks + 1) if ranks % r == 0 and (possible is None or r in possible)]
        counts = [r for r in divisors if options.stage_counts is None or ranks // r in options.stage_counts]
        if not counts and options.replicas is None:
            asked = " or ".join(map(str, sorted(options.stage_counts or ())))
            raise ConfigError(
                f"{ranks} ranks cannot be {asked} stages with as many replicas each, as they must where a rank gives "
                "its own replica's rows. Stages with different numbers of replicas take rows of the whole batch: "
                'grace.torch.Pipeline(..., inputs="global"), and every rank passes the whole batch'
            )
    plans = list[PipelinePlan]()
    refused = [ConfigError(f"{ranks} ranks cannot have {options.replicas} replicas of every stage")]
    # each number of replicas is another batch, so that steps are compared by rows per second
    for replicas in counts:
        batch = rows * (replicas or (max(by_stage) if each and by_stage else 1))
        chosen = options if replicas is None else dataclasses.replace(options, replicas=replicas)
        try:
            plans.append(search_plan(graph, ranks, batch, links or DEFAULT_LINKS, chosen))
        except ConfigError as error:
            refused.append(error)
    if not plans:
        raise nearest_error(refused)
    return max(plans, key=lambda plan: plan.batch / max(plan.seconds, 1e-12))


def check_optimizer_state_whole(make_optimizer: MakeOptimizer) -> None:
    """Raise ConfigError if the user's optimizer spreads its state over ranks. Every rank must call it: making one may
    be a collective."""
    try:
        optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(8, 8))])
    except Exception:  # it needs the model's own parameters
        return
    for cls in type(optimizer).__mro__:
        if cls.__module__.partition(".")[0] in SHARDING or cls.__module__.startswith("torch.distributed."):
            raise ConfigError(
                f"optimizer= makes a {type(optimizer).__name__} ({cls.__module__}), which spreads its state over ranks "
                "(ZeRO): in a pipeline each rank updates all parameters of its own stages, and no others. Give the "
                "plain optimizer; more stages, or fewer replicas, leave less of its state to each rank"
            )


def state_bytes(make_optimizer: MakeOptimizer, parameters: Iterable[torch.Tensor]) -> float:
    """Return the bytes that an optimizer keeps for each byte of its parameters, measured by its first step with fake
    ones of the same shapes.

    >>> state_bytes(lambda parameters: torch.optim.Adam(parameters), torch.nn.Linear(8, 8).parameters())
    2.0
    """
    with FakeTensorMode(), contextlib.suppress(Exception):  # it may need the model's own parameters
        own = [torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype)) for p in parameters if p.requires_grad]
        own = own or [torch.nn.Parameter(torch.empty(8, 8))]  # torch refuses an empty list
        for p in own:
            p.grad = torch.empty_like(p)
        optimizer = make_optimizer(own)
        done = False
        with contextlib.suppress(Exception):  # some optimizers read values, but have made their state before that
            optimizer.step()
            done = True
        kept = [one for p in own for one in optimizer.state[p].values() if isinstance(one, torch.Tensor)]
        if done or kept:  # counters of steps are no state of a parameter's size
            return sum(one.nbytes for one in kept if one.numel() > 1) / sum(p.nbytes for p in own)
    return 1.0  # as of momentum


def update_seconds(make_optimizer: MakeOptimizer, device: torch.device) -> float:
    """Return the seconds of an optimizer's step for each byte of its parameters, including the scaling of gradients
    that a pipeline does before; 0 if it cannot be tried.

    >>> 0 < update_seconds(lambda parameters: torch.optim.SGD(parameters, lr=0.1), torch.device("cpu")) < 1e-6
    True
    """
    p = torch.nn.Parameter(torch.zeros(TIMED_ELEMENTS, device=device))
    seconds = list[float]()
    p.grad = torch.ones_like(p)
    try:
        optimizer = make_optimizer([p])
        for _ in range(5):  # the first step makes the state; undisturbed() leaves it out
            began = time.perf_counter()
            p.grad.mul_(0.5)
            optimizer.step()
            float(p.detach()[0])  # reading a value waits for the device
            seconds.append(time.perf_counter() - began)
    except Exception:  # it needs the model's own parameters
        return 0.0
    return undisturbed(seconds) / p.nbytes


def given_plan(plan: PipelinePlan | str | os.PathLike[str] | None) -> PipelinePlan | None:
    """Return the user's plan, or the plan of the user's file; None if there is none yet. Refuse what is neither."""
    if plan is None or isinstance(plan, PipelinePlan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise ConfigError(f"plan= must be a file or a PipelinePlan, not {plan!r}")
    return PipelinePlan.load(Path(plan)) if Path(plan).exists() else None


def torch_version() -> dict[str, str]:
    """Return the version of torch, as a plan remembers it."""
    return {"torch": public(torch.__version__)}
