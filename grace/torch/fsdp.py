"""FSDP2: compressed exchange over the replicate axis, of what was reduced within each shard group."""

from collections.abc import Sequence
from typing import Any

import torch

from grace.backends.runtime import check_group
from grace.backends.torch_distributed import TorchBackend
from grace.core.context import Context
from grace.errors import ConfigError, ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Contribution, Outcome, Traffic
from grace.exchange.header import resolve
from grace.exchange.round_trip import RoundTrip, start_round_trip
from grace.exchange.tracing import recorder
from grace.planner.asked import asked
from grace.session import checkpoint
from grace.session.hyperparameters import facts as in_words
from grace.session.metrics import metrics
from grace.session.settings import check_integer
from grace.session.setup import build_step_runner
from grace.session.step_runner import StepRunner
from grace.session.versions import public
from grace.strategy.choices import Choices
from grace.torch.ddp import DDPState
from grace.torch.fsdp_layout import (
    ModuleLayout,
    below,
    groups_of,
    know_each_other,
    layouts_of,
    whole_mesh,
)
from grace.torch.parameters import check_momentum, check_optimizer, check_prompt, hyperparameters
from grace.torch.state_dict import on_devices, unpacked


class FSDPState(DDPState):
    """What the hook keeps between steps, keyed by the parameters' full names; of each the part that this rank has.

    FSDP2 reduces a module's gradients into one flat buffer, and hands it over; parameters are views of it. A step ends
    where an optimizer makes one, or where a module comes a second time (a step that a scaler left out). Then the ranks
    of a shard group tell each other whether one of theirs overflowed, so that all keep what they remember, or none.
    """

    registered_by = "register_fsdp_hook"

    def __init__(
        self,
        layouts: Sequence[ModuleLayout],
        runner: StepRunner,
        optimizer: Any,
        grad_scaler: Any,
        mesh: Any,
    ):
        params = {
            name: param.sharded_param
            for layout in layouts
            for name, param in zip(layout.names, layout.params, strict=True)
            if param.sharded_param.requires_grad
        }
        super().__init__(params, runner, optimizer, grad_scaler, None)
        self.limits = {id(communicator): None for communicator in runner.communicators}
        self.layouts, self.mesh = layouts, mesh
        self.shard_groups = [TorchBackend(group).duplicate() for group in mesh.get_all_groups()]
        self.spoilt: bool | None = None

    @property
    def traffic(self) -> Traffic:
        """What this rank exchanged over the replicate axis so far, counted; read it after the optimizer's step."""
        return self.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Numbers of this rank's exchange with its replicas, for a logger, since the last call; see
        :mod:`grace.session.metrics`. No collective."""
        return metrics(self.runner, self.traffic)

    @property
    def begun(self) -> bool:
        """Whether the gradients of a step were exchanged, and no optimizer has used them yet."""
        waiting = self.open and self.runner.stateful and self.uses.unused
        return self.runner.begun or (waiting and not self._overflowed())

    def _count_updates(self) -> None:
        """The optimizer's steps are seen."""

    def before_step(self, optimizer: Any) -> None:
        """An optimizer is about to use the gradients; others may hold the other parameters."""
        self.uses.step_begins(optimizer)
        if not self.uses.waiting:
            self.close_step()
        if self.optimizer is None:
            self.runner.context.updates += 1

    @property
    def dropped(self) -> bool:
        """Whether the step under way overflowed somewhere, so that nobody keeps what it changed."""
        return self.open and self._guards() and self._overflowed()

    def _guards(self) -> bool:
        """Whether anything is remembered, here or by reduce-scatters."""
        return self.runner.stateful or any([state.communicator.stateful for state in below(self.layouts)])

    def close_step(self) -> None:
        """Commit what the last step changed, or drop it if a rank of the shard group overflowed. All of them must come
        here.

        Raises:
            StepError: the replicas are at different steps.
        """
        if self.dropped:
            self.outcomes.append(Outcome(self.runner.variables[0], None, True))
            for state in below(self.layouts):
                state.overflow = True
        self.seen.clear()
        self.spoilt = None
        super().close_step()

    def _overflowed(self) -> bool:
        """Whether a gradient of the step under way did, on any rank of the shard group; asked once a step."""
        if self.spoilt is None:
            resolve(self.trips)
            flag = torch.zeros(1, device=next(iter(self.names)).device)
            flag.fill_(float(any([outcome.overflow for outcome in self.outcomes])))
            for group in self.shard_groups:
                with group.waiting_for_ranks(lambda: f"the comparison of gradients at step {self.runner.context.step}"):
                    flag = group.allreduce(flag).wait()
            self.spoilt = bool(flag)
        return self.spoilt

    def state_dict(self) -> dict[str, Any]:
        """What all replicas remember of the parts that this rank has, as bytes under these parts' own key; every rank
        must call it. ``torch.distributed.checkpoint`` saves and loads it whole: put this object into what is saved.

        Raises:
            ExchangeError: gradients were exchanged, and no optimizer has used them yet.
        """
        return {self._key: self.full_state_dict(packed=True)}

    def load_state_dict(self, state: Any, memory: str = "strict") -> None:
        """Restore what :meth:`state_dict` gave, on as many shards, and any number of replicas;
        :mod:`grace.session.checkpoint` has the rules, and says what ``memory`` may be. Every rank must call it.

        Raises:
            ConfigError: it is of another number of shards, is damaged, or does not fit.
            RankError: it was refused on another rank, of replicas and shards, or they load different steps.
        """
        parameters = {name: p for p, name in self.names.items()}

        def read() -> Any:
            self._settle()
            if not isinstance(state, dict) or self._key not in state:
                there = ", ".join(map(str, state)) if isinstance(state, dict) else "nothing"
                raise ConfigError(
                    f"this rank needs what was remembered of {self._key}, and there is {there or 'nothing'}: memories "
                    "follow their parts of the parameters, and cannot be loaded with another number of shards. Start "
                    "without them"
                )
            return unpacked(state[self._key])

        inside = lambda saved: on_devices(saved, parameters)  # noqa: E731
        checkpoint.load(self.runner, read, memory, inside, self.shard_groups)

    @property
    def _key(self) -> str:
        ranks = self.mesh.mesh.flatten().tolist()
        return f"shard_{ranks.index(torch.distributed.get_rank())}_of_{len(ranks)}"

    def close(self) -> None:
        """End the exchange: compressors and memories given by you may serve another one. Every rank must call it.

        From now on the model's gradients are means of each shard group alone, until another hook is registered.
        """
        super().close()
        for layout in self.layouts:
            layout.module.set_all_reduce_hook(_nothing)

    @torch.no_grad()
    def exchange_module(self, layout: ModuleLayout, flat: torch.Tensor) -> None:
        """The hook proper: the mean over replicas takes the place of what one shard group has."""
        if layout.name in self.seen:
            self.close_step()
        first = not self.seen
        self.seen.add(layout.name)
        if first:
            check_momentum(self.momenta, self.optimizer, later=True)
            self.open = True
            if self.runner.follows_scaler():
                self.runner.rescale(self.grad_scaler.get_scale())
        if recorder.run is not None:
            recorder.run.gradient()
        pieces = layout.pieces(flat)
        shards = [(shard, piece.of(flat)) for piece in pieces for shard in self.runner.shards_of[piece.name]]
        views = {shard.variable.name: shard.slice_of(whole) for shard, whole in shards}
        guard, traffic = self._guards(), self.runner.traffic
        trips: list[RoundTrip] = []
        for bucket in self.buckets(tuple(piece.name for piece in pieces), first):
            gradients = [views[variable.name] for variable in bucket.variables]
            trip = start_round_trip(Contribution(bucket, gradients, [True] * len(gradients), guard, traffic))
            trip.deferred = trip.next_step = True
            trips.append(trip)
        try:
            while any([trip.advance() for trip in trips]):
                pass
            for trip in trips:
                trip.wait()
                self._write(trip, views)
                if trip.header.out_of_step:
                    raise StepError(trip.header.out_of_step)
        except (PayloadError, StepError):
            self.seen.clear()
            self.spoilt = None
            self._drop()
            raise
        self.trips += trips
        self.uses.exchanged(piece.name for piece in pieces)


def _nothing(flat: torch.Tensor) -> None:
    """What a closed hook does."""


def register_fsdp_hook(
    model: Any,
    mesh: Any = None,
    compressor: Any = None,
    memory: Any = None,
    strategy: Any = None,
    *,
    communicator: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: Any = None,
    compress_after: int = 0,
    seed: int = 0,
) -> FSDPState:
    """Compress what the replicas of a sharded model exchange.

    ``fully_shard`` reduces gradients within each group of ranks that hold one copy of the model; here the copies
    average what they have, each parameter's part as a variable of its own, compressed. Tensor parallelism may cut
    parameters further. A parameter that no rank used in a step gets zeros for its gradient, not None, as by
    ``set_reduce_scatter_unused_params(True)``. It needs torch 2.13.

    Args:
        model: a module that ``torch.distributed.fsdp.fully_shard`` was called on, with a mesh of one axis.
        mesh: the replicate axis, as ``mesh["replicate"]`` of a mesh of two axes; it may be left out where every rank
            holds a copy of its own (a shard axis of size 1).
        compressor, memory, communicator, strategy: as for :func:`grace.DistributedOptimizer`.
        optimizer: needed by memories that follow the learning rate (efsignsgd), and where a memory (dgc) or
            compressor (signum) applies momentum, which the optimizer's must not double.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        compress_after: steps that are exchanged uncompressed first.
        seed: of the random numbers of stochastic methods; the same on all ranks.

    Returns:
        The hook's state, with ``state_dict()`` and ``load_state_dict()``, which every rank must call, and ``traffic``;
        ``torch.distributed.checkpoint`` saves and loads it beside the model.

    Raises:
        ConfigError: what was given cannot work.
        RankError: the replicas gave different things, or another one's cannot work.

    Example::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = grace.torch.register_fsdp_hook(model, mesh["replicate"], compressor="topk(ratio=0.01)")
    """
    layouts = layouts_of(model, "register_fsdp_hook")
    whole = whole_mesh(layouts)
    check_group(TorchBackend())
    backend = TorchBackend(_group(mesh, whole))
    know_each_other(backend.size * whole.size())
    context = Context(seed=seed)

    def check(given):
        check_optimizer(given, optimizer)
        check_prompt(given, "FSDP's hook cannot")

    def choose():
        choices = Choices(compressor, memory, communicator, strategy)
        if asked(choices):
            raise ConfigError(
                "strategy='auto' plans while training runs, which FSDP's hook cannot: give a strategy's file"
            )
        return choices.plan()

    facts = [
        ("torch", public(torch.__version__)),
        ("the buckets of", "fully_shard"),
        ("grad_scaler", "none" if grad_scaler is None else "given"),
        *([] if optimizer is None else in_words(type(optimizer).__name__, hyperparameters(optimizer))),
    ]
    facts.append(("compress_after", str(compress_after)))

    def list_variables():
        check_integer("compress_after", compress_after, low=0)
        return [variable for layout in layouts for variable in layout.variables()]

    runner = build_step_runner(list_variables, choose, backend, context, facts, check, compress_after=compress_after)
    averaged = [name for name, shard in runner.shards.items() if shard.period]
    if averaged or runner.hierarchical:
        runner.close()
        what = f"averages {averaged[0]!r} now and then" if averaged else "is hierarchical"
        raise ConfigError(f"the strategy {what}, which FSDP's hook cannot")
    recorder.note(waits="fully_shard")
    state = FSDPState(layouts, runner, optimizer, grad_scaler, whole)
    context.lr = state.lr
    for layout in layouts:
        layout.module.set_reduce_scatter_unused_params(True, recurse=False)
        layout.module.set_all_reduce_hook(Hook(state, layout))
    return state


class Hook:
    """What FSDP2 calls with the reduced gradients of one module."""

    def __init__(self, state: FSDPState, layout: ModuleLayout):
        self.grace_state, self.layout = state, layout

    def __call__(self, flat: torch.Tensor) -> None:
        if not any(group.all_reduce_grads for group in groups_of(self.layout.module)):
            raise ExchangeError(
                f"module {self.layout.name!r}: set_requires_all_reduce(False) does not hold Grace's exchange back. To "
                "accumulate, use set_requires_gradient_sync(False)"
            )
        self.grace_state.exchange_module(self.layout, flat)


def _group(mesh: Any, whole: Any) -> Any:
    """The process group of the replicate axis, beside the mesh of one copy of the model.

    Raises:
        ConfigError: it is none, or not given.
    """
    own, world = whole.mesh.flatten().tolist(), torch.distributed.get_world_size()
    if mesh is None:
        if len(own) == 1 or world == 1:
            return None
        raise ConfigError(
            f"the model is sharded over {len(own)} of {world} ranks, and mesh= was not given: what is the replicate "
            "axis? Make a mesh of both, init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
            "'shard')), give fully_shard mesh['shard'], and register_fsdp_hook mesh['replicate']"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("replicate", "shard")
        raise ConfigError(f"mesh= has {mesh.ndim} axes, and must be the replicate axis alone: mesh[{names[0]!r}]")
    both = set(own) & set(mesh.mesh.flatten().tolist())
    if len(both) != 1:
        raise ConfigError(
            f"the ranks {sorted(both)} share a copy of the model, and are replicas of each other by mesh=: it must be "
            "the replicate axis, across which ranks hold the same part of the model, and not the one given to "
            "fully_shard"
        )
    return mesh.get_group()
