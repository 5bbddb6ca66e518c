"""FSDP2: compressed exchange, over the replicate axis, of gradients that were reduced within each shard group."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from grace.backends.runtime import check_group
from grace.backends.torch_distributed import TorchBackend
from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Outcome, Traffic
from grace.exchange.header import digest, resolve_headers
from grace.exchange.round_trip import advance_all
from grace.session import checkpoint
from grace.session.metrics import metrics
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg
from grace.torch.ddp import DDPState, build_hook_runner, check_holds_parameters
from grace.torch.fsdp_layout import (
    TRAINED_BEFORE,
    ModuleLayout,
    ModulePasses,
    ShardGroup,
    check_not_compressed,
    find_layouts,
    fsdp_param_groups,
    in_backward,
    reduce_scatter_states,
    replica_states,
)
from grace.torch.state_dict import move_to_devices, unpack_state

DRIFTED = (
    "the ranks made a step with different hyperparameters, or with modules in another order; the first difference: ",
    "Let schedules follow what is the same on every rank, and let all replicas run the same modules in the same order",
)


class FSDPState(DDPState):
    """The state of the hook between steps, keyed by the parameters' full names; of each parameter the part that this
    rank has.

    FSDP2 reduces a module's gradients into one flat buffer, and passes it to the hook; parameters are views of it. A
    step ends when an optimizer steps outside of backward, or when a module comes a second time (a GradScaler left the
    step out, or optimizers step in backward). Then the ranks of a shard group compare whether a gradient of theirs
    overflowed, so that all of them keep their state, or none.
    """

    registered_by = "register_fsdp_hook"

    def __init__(
        self,
        shard_group: ShardGroup,
        runner: StepRunner,
        optimizer: torch.optim.Optimizer | None,
        grad_scaler: torch.amp.GradScaler | None,
    ):
        super().__init__(_trained_parameters(shard_group.layouts), runner, optimizer, grad_scaler, None)
        self.limits = {id(communicator): None for communicator in runner.communicators}
        self.layouts = shard_group.layouts
        self.shard_group = shard_group
        shard_group.connect()
        self.stateful = shard_group.any(runner.stateful_communicators, "the registration of FSDP's hook")
        """True if a rank of the shard group keeps state between steps. A rank whose parts are too small for the method
        keeps none itself, and takes part in the group's comparisons all the same."""
        self.passes = ModulePasses()
        self.order = ""
        """The modules of the last step, in the order of their gradients: no wire says whose gradients it has."""
        runner.callbacks.drifted = DRIFTED
        self.any_overflow: bool | None = None
        """True if a rank of the shard group overflowed in this step; None until the ranks have compared."""

    def _compared_settings(self) -> object:
        return self.hyperparameters, self.order

    def _describe_hyperparameters(self) -> list[tuple[str, str]]:
        return [*super()._describe_hyperparameters(), ("modules in the order", self.order)]

    @property
    def traffic(self) -> Traffic:
        """The traffic of this rank over the replicate axis so far. Read it after the optimizer's step."""
        return self.runner.traffic

    def metrics(self) -> dict[str, float]:
        """Return numbers of this rank's exchange with its replicas, for a logger, since the last call; see
        :mod:`grace.session.metrics`. No collective."""
        return metrics(self.runner, self.traffic)

    @property
    def in_progress(self) -> bool:
        """True if the gradients of a step were exchanged, and no optimizer has used them yet. Every rank must read it
        within a step."""
        if self.runner.in_progress or not self.open or not self.uses.waiting or not self._exchange_has_state():
            return self.runner.in_progress
        place = "the comparison of unused gradients"  # a rank's own parts may be zeros
        return self.shard_group.any(bool(self.uses.unused_gradients()), place) and not self._overflowed()

    def _count_updates(self) -> None:
        """Do nothing: the optimizer's steps are seen by hooks."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that an optimizer is about to use the gradients. Other optimizers may hold the other parameters, so
        the step is closed when no gradient is unused; not in a backward pass, where those of other modules follow."""
        self.uses.begin_step(optimizer)
        if not self.uses.waiting and not in_backward():
            self.close_step()
        if self.optimizer is None:
            self.runner.context.updates += 1

    @property
    def dropped(self) -> bool:
        """True if the step in progress overflowed on some rank, so that no rank keeps its changes."""
        return self.open and self._has_state() and self._overflowed()

    def _has_state(self) -> bool:
        """Return True if the exchange or a compressed reduce-scatter keeps state between steps."""
        return self._exchange_has_state() or any(
            [state.communicator.stateful for state in reduce_scatter_states(self.layouts)]
        )

    def _exchange_has_state(self) -> bool:
        """Return True if the exchange keeps state between steps on a rank of the shard group."""
        return self.stateful or self.runner.has_carried_over

    def close_step(self) -> None:
        """Commit the last step, or drop it if a rank of the shard group overflowed. All ranks of the group must call
        it.

        Raises:
            StepError: the replicas are at different steps.
        """
        if self.dropped:
            # Compressed reduce-scatters of this step learn of another replica's overflow while the step is open here.
            for state in reduce_scatter_states(self.layouts):
                state.close_step()
        self._end_step()

    def _end_step(self) -> None:
        """Commit the last step, or drop it, after its reduce-scatters have ended it."""
        if self.dropped:  # an outcome that overflowed makes the runner roll back the whole step
            self.outcomes.append(Outcome(self.runner.variables[0], None, True))
        order = ", ".join(self.passes.seen)
        self.passes.clear()
        self.any_overflow = None
        super().close_step()  # compares the order of the step before
        if order:
            self.order = order
            self.context.hyperparameter_digest = digest(self._compared_settings())

    def _overflowed(self) -> bool:
        """Return True if a gradient of the step in progress overflowed on a rank of the shard group. One collective a
        step."""
        if self.any_overflow is None:
            resolve_headers(self.trips)
            overflow = any([outcome.overflow for outcome in self.outcomes])
            place = f"the comparison of gradients at step {self.runner.context.step}"
            self.any_overflow = self.shard_group.any(overflow, place)
        return self.any_overflow

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all replicas hold for the parts that this rank has, as bytes under the key of these
        parts. Every rank must call it. Put this object into the dict that ``torch.distributed.checkpoint`` saves: it
        saves and loads the bytes whole.

        Raises:
            ExchangeError: gradients were exchanged, and no optimizer has used them yet.
        """
        return {self.shard_group.label: self.full_state_dict(packed=True)}

    def load_state_dict(self, state: dict[str, Any] | bytes | None, memory: str = "strict") -> None:
        """Restore a result of :meth:`state_dict`, on as many shards, and any number of replicas;
        :mod:`grace.session.checkpoint` documents the rules and the values of ``memory``. Every rank must call it.

        Raises:
            ConfigError: the state has another number of shards, is damaged, or does not fit.
            RankError: another rank, replica or shard, refused its state, or they load different steps.
        """
        parameters = {name: p for p, name in self.names.items()}

        def read() -> SavedState | None:
            """Return this rank's entry of the state to load."""
            self._close_settled_step()
            part = self.shard_group.label
            if not isinstance(state, dict) or part not in state:
                found = ", ".join(map(str, state)) if isinstance(state, dict) else "nothing"
                raise ConfigError(
                    f"this rank needs the memories of {part}, and there is {found or 'nothing'}: memories belong to "
                    "shards of the parameters, and cannot be loaded with another number of shards. Start "
                    "without them"
                )
            return unpack_state(state[part])

        convert = partial(move_to_devices, parameters=parameters)
        checkpoint.load(self.runner, read, memory, convert, self.shard_group.backends)

    def close(self) -> None:
        """End the exchange. Compressors and memories given by you may serve another one afterwards. Every rank must
        call it.

        From now on the model's gradients are means of each shard group alone, until another hook is registered.
        """
        if self.closed:  # another hook may have taken its place
            return
        super().close()
        for layout in self.layouts:
            layout.module.set_all_reduce_hook(_do_nothing)

    @torch.no_grad()
    def exchange_module(self, layout: ModuleLayout, flat: torch.Tensor) -> None:
        """Replace the reduced gradients of a module by their means over replicas. This is the work of the hook."""
        layout.check_not_replaced()
        if self.passes.comes_again(layout.name):
            self._end_step()  # for a reduce-scatter of this module another step has begun already
        elif layout.name in self.passes.seen:
            resolve_headers(self.trips)  # before this module's wire is written again
        first = not self.passes.seen
        self.passes.record(layout.name)
        if first:
            self._begin_step()
        gradients = {piece.name: piece.view(flat) for piece in layout.pieces(flat)}
        for name in gradients:
            if name not in self.runner.shards_of:
                raise ExchangeError(f"parameter {name!r} was frozen when the hook was registered. {TRAINED_BEFORE}")
        trips, views = self._start_trips(gradients, first)
        try:
            advance_all(trips)
            for trip in trips:
                trip.wait()
                self._write(trip, views)
                if trip.header.out_of_step:
                    raise StepError(trip.header.out_of_step)
        except (PayloadError, StepError):
            self.passes.clear()
            self.any_overflow = None
            self._discard_step()
            raise
        self.trips += trips
        self.uses.record_exchange(gradients)


def _do_nothing(flat: torch.Tensor) -> None:
    """Do nothing: the hook of a module whose state was closed."""


def register_fsdp_hook(
    model: torch.nn.Module,
    mesh: DeviceMesh | None = None,
    compressor: CompressorArg | None = None,
    memory: MemoryArg | None = None,
    strategy: StrategyArg | None = None,
    *,
    communicator: CommunicatorArg | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    compress_after: int = 0,
    seed: int = 0,
) -> FSDPState:
    """Compress the gradient exchange between the replicas of a sharded model.

    ``fully_shard`` reduces gradients within each group of ranks that hold one copy of the model. This hook averages the
    reduced gradients over the copies, each parameter's part as a separate variable, compressed. Tensor parallelism may
    cut parameters further. A parameter that no rank used in a step gets zeros for its gradient, not None, as by
    ``set_reduce_scatter_unused_params(True)``. FSDP2 reduces a module that runs twice in one forward pass twice. It
    needs torch 2.13.

    Args:
        model: a module that ``torch.distributed.fsdp.fully_shard`` was called on, with a mesh of one axis.
        mesh: the replicate axis, as ``mesh["replicate"]`` of a mesh of two axes; it may be left out where every rank
            holds a copy of its own (a shard axis of size 1).
        compressor, memory, communicator, strategy: the same as for :func:`grace.DistributedOptimizer`.
        optimizer: the optimizer of the model. Needed by memories that follow the learning rate (efsignsgd), and where
            a memory (dgc) or compressor (signum) applies momentum, which the optimizer's must not double.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        compress_after: steps that are exchanged uncompressed first.
        seed: seed of the random numbers of stochastic methods; the same on all ranks.

    Returns:
        The hook's state, with ``state_dict()`` and ``load_state_dict()``, which every rank must call, and ``traffic``;
        ``torch.distributed.checkpoint`` saves and loads it along with the model.

    Raises:
        ConfigError: the arguments cannot work.
        RankError: the replicas' arguments differ, or another one's cannot work.

    Example::

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = grace.torch.register_fsdp_hook(model, mesh["replicate"], compressor="topk(ratio=0.01)")
    """
    layouts = find_layouts(model, "register_fsdp_hook")
    shard_group = ShardGroup(layouts)
    check_group(TorchBackend())
    backend = TorchBackend(_replicate_group(mesh, shard_group.ranks))
    shard_group.meet_replicas([backend.number_of(rank) for rank in range(backend.size)], "mesh=")

    def variables() -> list[Variable]:
        """List the variables to exchange: each parameter's part that this rank has."""
        check_not_compressed(layouts, replica_states, "the exchanges between replicas")
        for layout in layouts:
            layout.check_real("register_fsdp_hook")
        return [variable for layout in layouts for variable in layout.variables()]

    runner = build_hook_runner(
        variables,
        Choices(compressor, memory, communicator, strategy),
        backend,
        Context(seed=seed),
        [],
        hook="FSDP's hook",
        wrapper="fully_shard",
        optimizer=optimizer,
        grad_scaler=grad_scaler,
        compress_after=compress_after,
    )
    if runner.hierarchical:
        runner.close()
        raise ConfigError("the strategy is hierarchical, which FSDP's hook cannot")
    check_holds_parameters(runner, _trained_parameters(layouts), optimizer)
    state = FSDPState(shard_group, runner, optimizer, grad_scaler)
    for layout in layouts:
        # buffers then have the same size on all replicas, whatever parameters a rank used
        layout.module.set_reduce_scatter_unused_params(True, recurse=False)
        layout.module.set_all_reduce_hook(Hook(state, layout))
    return state


def _trained_parameters(layouts: Sequence[ModuleLayout]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of modules that require gradients, by full name; of each the part that this rank has."""
    return {
        name: param.sharded_param
        for layout in layouts
        for name, param in zip(layout.names, layout.params, strict=True)
        if param.sharded_param.requires_grad
    }


class Hook:
    """The callable that FSDP2 calls with the reduced gradients of one module."""

    def __init__(self, state: FSDPState, layout: ModuleLayout):
        self.grace_state = state  # fsdp_layout finds states by the name of this attribute
        self.layout = layout

    def __call__(self, flat: torch.Tensor) -> None:
        if not any(group.all_reduce_grads for group in fsdp_param_groups(self.layout.module)):
            raise ExchangeError(
                f"module {self.layout.name!r}: set_requires_all_reduce(False) does not hold Grace's exchange back. To "
                "accumulate, use set_requires_gradient_sync(False)"
            )
        self.grace_state.exchange_module(self.layout, flat)


def _replicate_group(mesh: DeviceMesh | None, own: Sequence[int]) -> dist.ProcessGroup | None:
    """Return the process group of the replicate axis; None for all ranks.

    Args:
        mesh: the replicate axis, as the user gave it.
        own: the ranks that hold one copy of the model.

    Raises:
        ConfigError: ``mesh`` has several axes, or is missing.
    """
    world = torch.distributed.get_world_size()
    if mesh is None:
        if len(own) == 1 or world == 1:
            return None
        raise ConfigError(
            f"the model is sharded over {len(own)} of {world} ranks, and mesh=, the replicate axis, was not "
            "given. Make a mesh of both axes, init_device_mesh(device, (replicas, shards), mesh_dim_names="
            "('replicate', 'shard')), give fully_shard mesh['shard'], and register_fsdp_hook mesh['replicate']"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("replicate", "shard")
        raise ConfigError(f"mesh= has {mesh.ndim} axes, and must be the replicate axis alone: mesh[{names[0]!r}]")
    return mesh.get_group()
