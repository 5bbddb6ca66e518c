"""``grace.torch.Pipeline``: a model that is cut into stages automatically, whose replicas exchange compressed
gradients."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.backends.object_collectives import from_root
from grace.backends.runtime import current
from grace.backends.topology import Topology, node_name
from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.errors import ConfigError, ExchangeError, warn
from grace.exchange.tracing import recorder
from grace.pipeline.planning.exchange_prediction import strategy_document
from grace.pipeline.planning.pipeline_plan import PipelinePlan
from grace.pipeline.planning.search import Numbers, SearchOptions
from grace.pipeline.torch import node_costs, pipeline_state
from grace.pipeline.torch.atomic_subcomponents import CapturedBatch
from grace.pipeline.torch.batches import broadcast_batch, count_rows, gather_outputs, micro_batches
from grace.pipeline.torch.call_comparison import CallComparison
from grace.pipeline.torch.capture import check_plain_model, modes_of, split_call, training_mode
from grace.pipeline.torch.mesh import Mesh
from grace.pipeline.torch.pipeline_state import OptimizerStateDict, StageTensors
from grace.pipeline.torch.plan_search import (
    MakeOptimizer,
    check_optimizer_state_whole,
    given_plan,
    search_plan_by_throughput,
    state_bytes,
    torch_version,
    update_seconds,
)
from grace.pipeline.torch.point_to_point import run_forward, run_schedule
from grace.pipeline.torch.stage_builder import BuiltStage, evaluation_stages, shape_key, sums_of_rows
from grace.pipeline.torch.stage_gradients import (
    MEAN_OF_LOSSES,
    Gradients,
    Loss,
    check_mean,
    check_options,
    chosen_strategy,
)
from grace.planner.exchange_costs import Costs
from grace.planner.network import Network
from grace.session.agreement import failing_together
from grace.strategy.execution import StrategyArg
from grace.torch.initial_sync import broadcast_parameters

INPUTS = ("replica", "global", "rank0")
MANY_SHAPES, MOST_SHAPES = 16, 64
"""Shapes of micro-batches after which a warning says that they are many, and for which stages are kept at most."""
Args = tuple[object, ...]
Kwargs = Mapping[str, object]
Work = tuple[BuiltStage, list[list[object]], list[object]]
"""This rank's stage, and for each micro-batch the inputs that the stage reads, and the target."""


class Pipeline:
    """A model that runs in stages on several ranks. Every rank must make it, and make the same calls.

    Args:
        model: any module that ``torch.export`` takes. Each rank trains the parameters of its stage in place. Modules
            that are in evaluation mode stay so until ``engine.train()``.
        example_inputs: a tensor, a tuple of arguments, or ``(args, kwargs)`` with a tuple and a dict; the model is cut
            for these. If left out, at the first batch.
        loss_fn: of the model's output and the target; None for a model that returns its loss. It must be a mean over
            rows.
        optimizer: makes an optimizer of a list of parameters.
        compressor, residual, communicator, strategy: as for :func:`grace.DistributedOptimizer` (``residual`` is Grace's
            memory), of the exchange over each stage's replicas. A stage with one replica exchanges nothing.
        microbatches, stages: their number, or several numbers to choose from.
        replicas: number of replicas of every stage, or a list with one number for each stage; or a range or set of
            numbers to choose from.
        schedule: "gpipe" or "1f1b"; both are tried if left out.
        recompute: True to keep only the values that enter a stage, and compute forward again for backward; None tries
            both.
        cuts: names of the last nodes of all stages but the last.
        blocks: number of blocks that stages are made from; several are tried each, 32 and 128 if left out.
        memory: bytes of a device; no limit if left out. ``memory_margin`` of them stays free.
        links: the network between ranks (:class:`grace.planner.network.Links`, or ``Costs``); 10 Gbit/s if left out.
        plan: a :class:`~grace.pipeline.planning.pipeline_plan.PipelinePlan`, or a file: written if it is not there, or
            else read.
        inputs: the rows that each rank passes. "replica": all ranks of a replica pass that replica's rows; "global":
            all ranks pass the whole batch; "rank0": rank 0's batch counts. By default "replica", which needs equally
            many replicas of all stages, or "global" where ``replicas`` gives stages different numbers.
        grad_scaler: a ``torch.amp.GradScaler``.
        whole: names of inputs that have no rows, though their first dimension has as many elements as the batch.
        profiles: the file of measured seconds; by default one in the user's cache. False uses none:
            operations are measured once in this process.
        init: for a model on ``meta``, a function that is called with each module whose tensors were made on this rank,
            and fills them; the module's ``reset_parameters()`` if left out.
        options: further ones of :func:`grace.DistributedOptimizer`: op, gradient_predivide_factor, seed, bucket_bytes,
            group_bytes, hierarchical, sparse_as_dense, compress_after. With ``op="sum"`` losses are added up over the
            replicas of the last stage.

    Raises:
        ConfigError: the arguments cannot work.

    >>> import grace
    >>> _ = grace.init("local")
    >>> x, y = torch.ones(4, 2), torch.zeros(4, 1)
    >>> sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    >>> engine = Pipeline(torch.nn.Linear(2, 1), x, torch.nn.functional.mse_loss, optimizer=sgd, microbatches=2)
    >>> losses = [engine.step(x, y).item() for _ in range(3)]
    >>> losses[2] < losses[0]
    True
    >>> grace.shutdown()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        example_inputs: object = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        optimizer: MakeOptimizer,
        compressor: CompressorArg | None = None,
        residual: MemoryArg | None = None,
        communicator: CommunicatorArg | None = None,
        strategy: StrategyArg | None = None,
        microbatches: Numbers = None,
        stages: Numbers = None,
        replicas: Numbers = None,
        schedule: str | Iterable[str] | None = None,
        recompute: bool | None = False,
        cuts: Sequence[str] | None = None,
        blocks: Numbers = None,
        memory: float | None = None,
        memory_margin: float = 0.1,
        links: Network | Costs | None = None,
        plan: PipelinePlan | str | os.PathLike[str] | None = None,
        inputs: str | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        whole: Sequence[str] = (),
        profiles: bool | str | Path = True,
        init: Callable[[torch.nn.Module], object] | None = None,
        **options: Any,
    ):
        if inputs not in (None, *INPUTS):
            raise ConfigError(f"inputs must be one of {', '.join(INPUTS)}, not {inputs!r}")
        self.search_options = SearchOptions(
            stages=stages,
            replicas=replicas,
            microbatches=microbatches,
            schedule=schedule,
            recompute=recompute,
            cuts=cuts,
            blocks=blocks,
            memory=memory,
            memory_margin=memory_margin,
            compressor=compressor,
            residual=residual,
            communicator=communicator,
        )
        self.links = links
        self.backend = current()
        if self.backend.name not in ("torch", "local"):
            raise ConfigError(
                f"a pipeline needs torch.distributed, which moves tensors between two ranks, and this run is over "
                f"{self.backend.name}: call grace.init('torch'), which joins ranks of torchrun, mpirun and srun"
            )
        check_plain_model(model)
        check_options(options, model)
        check_mean(loss_fn)
        self.model = model
        self.loss_fn = loss_fn
        self.make_optimizer = optimizer
        self.scaler = grad_scaler
        self.user_plan = plan
        self.user_inputs = inputs
        self.whole = whole
        self.profiles = node_costs.cache_file() if profiles is True else profiles or None
        named = {"compressor": compressor, "memory": residual, "communicator": communicator, "strategy": strategy}
        self.options = {**options, **{name: value for name, value in named.items() if value is not None}}
        self._exchanging = True
        """False within ``no_sync()``."""
        self._pending = False
        """True if gradients were accumulated that are not exchanged yet."""
        self._failure = ""
        """Error that ended a call of this rank in the middle; empty if there was none."""
        self._built: dict[Hashable, BuiltStage] = {}
        self.plan: PipelinePlan | None = None
        self.steps = 0
        self.init = init
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.device = torch.device("cpu") if device.type == "meta" else device
        if example_inputs is not None:
            self._set_up(*split_call(example_inputs))

    # -- the cut ------------------------------------------------------------------------------------------

    def _set_up(self, args: Args, kwargs: Kwargs) -> None:
        """Plan the pipeline, and set up this rank's stage."""
        if self.user_inputs == "rank0":  # other ranks' tensors may be empty
            # by the host: a rank may not see the device of rank 0
            on_host = pytree.tree_map_only(torch.Tensor, lambda one: one.cpu(), (args, kwargs))
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda one: one.to(self.device), from_root(lambda: on_host)
            )
        # 1. capture the model
        with training_mode(self.model):
            with failing_together(self.backend, "a pipeline"):
                check_optimizer_state_whole(self.make_optimizer)
                batch = CapturedBatch(self.model, args, kwargs, self.whole)
                # Several outputs are no loss: such a pipeline only evaluates, and adds up the sums.
                if self.loss_fn is None and sums_of_rows(batch) == [True]:
                    raise ConfigError(f"the model returns a sum over rows for its loss, and {MEAN_OF_LOSSES}")
            self._captured, self._is_whole = batch.captured, batch.whole  # without the batch's tensors
            self._cut_modes = modes_of(self.model)
            # 2. read or search the plan, the same on all ranks
            plan = from_root(lambda: given_plan(self.user_plan))  # the file is on rank 0's host
            if plan is None:
                plan = self._search_plan(batch)
        with failing_together(self.backend, "a pipeline"):  # one rank alone may have another model or torch
            plan.check(batch.atoms.graph(batch.rows), self.backend.size, torch_version())
        # 3. make the groups of ranks, and this rank's part of the model
        self.mesh = mesh = Mesh(plan, self.backend, self.device)
        self.inputs = self.user_inputs or ("replica" if mesh.equal_replicas else "global")
        if self.inputs == "replica" and not mesh.equal_replicas:
            raise ConfigError("inputs='replica' needs as many replicas of each stage: use inputs='global'")
        self.nodes = [stage.nodes for stage in plan.stages]
        self.comparison = CallComparison(mesh, self.inputs == "replica")
        self.tensors = StageTensors(self.model, batch.atoms, self.nodes, mesh)
        with failing_together(self.backend, "a pipeline"):
            self.tensors.materialize(self.init)
        self.parameters, self.buffers = self.tensors.parameters, self.tensors.buffers
        # 4. make the stage's optimizer, and let its replicas start equal
        recorder.begin(self.backend, ())  # traces number ranks among all ranks, and not among the stage's replicas
        holders = self.tensors.parameter_holders
        self.gradients = Gradients(holders, self.parameters, self.make_optimizer, mesh, self.scaler, self.options)
        # The distributed optimizer broadcasts its parameters itself, if this rank has one.
        unequal_tensors = {**self.buffers, **({} if self.gradients.has_optimizer else self.parameters)}
        if unequal_tensors and mesh.stage_backend.size > 1:
            broadcast_parameters(unequal_tensors, 0, mesh.stage_backend)
        self.plan = plan  # the model counts as cut from here on

    def _search_plan(self, batch: CapturedBatch) -> PipelinePlan:
        """Return a new plan, the same on all ranks, and write it to the user's file.

        All ranks measure the model at once, as they will compute at once, which takes longer on one machine than alone.
        """
        hosts = self.backend.allgather_object(node_name())
        local_ranks = hosts.count(hosts[self.backend.rank])
        costs = node_costs.costs_by_rows(batch, file=self.profiles, local_ranks=local_ranks)
        on_meta = any(p.is_meta for p in self.model.parameters())
        # a model on meta may be larger than this machine's memory: nothing is run
        update = 0.0 if on_meta else update_seconds(self.make_optimizer, self.device)

        def search() -> PipelinePlan:
            """Search a plan with rank 0's costs, and save it."""
            strategy = chosen_strategy(self.options)
            options = dataclasses.replace(
                self.search_options,
                strategy=strategy_document(strategy, dict(self.model.named_parameters())) or strategy,
                nodes=Topology(hosts).ranks,
                optimizer_state=state_bytes(self.make_optimizer, self.model.parameters()),
                optimizer_seconds=update,
            )
            graph = batch.atoms.graph(batch.rows, costs)
            unequal = len(set(options.replicas_by_stage or ())) > 1
            each = self.user_inputs == "replica" or (self.user_inputs is None and not unequal)
            plan = search_plan_by_throughput(graph, len(hosts), batch.rows, each, self.links, options)
            plan = dataclasses.replace(plan, versions={**plan.versions, **torch_version()})
            if isinstance(self.user_plan, (str, os.PathLike)):
                plan.save(Path(self.user_plan))
            return plan

        return from_root(search)

    def _check_planned(self) -> None:
        """Refuse a call before the model was cut."""
        if self.plan is None:
            raise ConfigError("the model is not cut yet: give example_inputs, or make the first step before")

    @property
    def optimizer(self) -> Any:
        """This rank's optimizer, of the parameters of its stage. A rank without parameters has one of a dummy, for the
        scaler."""
        self._check_planned()
        return self.gradients.optimizer

    @property
    def stage(self) -> int:
        """Number of this rank's stage."""
        self._check_planned()
        return self.mesh.stage

    @property
    def replica(self) -> int:
        """Number of the replica of its stage that this rank is; the rank of a DistributedSampler with :attr:`replicas`
        replicas."""
        self._check_planned()
        return self.mesh.replica

    @property
    def replicas(self) -> int:
        """Number of replicas of this rank's stage."""
        self._check_planned()
        return self.mesh.replicas[self.stage]

    def _begin_call(self, args: Args, kwargs: Kwargs, targeted: bool) -> Work:
        """Return this rank's work in a call, which the ranks have compared. ``targeted`` is True if the last of
        ``args`` is the target, provided that there is a loss function."""
        if self._failure:
            raise ExchangeError(
                f"a call of this pipeline has failed on this rank: {self._failure}. Other stages wait for its "
                "messages, so it cannot go on: end the program on all ranks, and resume from a checkpoint"
            )
        mode = (1 + self._exchanging) if self.training else 0
        return self.comparison.compare(lambda: self._prepare(args, kwargs, targeted), mode, self.gradients)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Return a context for the stages' messages. An error in it, as of the loss function, leaves other ranks
        waiting for this one. In a further call all would wait for each other, until the timeout."""
        try:
            yield
        except BaseException as error:
            if self.mesh.channel is not None:  # else there is no other rank
                self._failure = f"{type(error).__name__}: {error}"
            raise

    def _prepare(self, args: Args, kwargs: Kwargs, targeted: bool) -> tuple[Work, Hashable, Sequence[object]]:
        """Return this rank's work in a call, and the shapes and values of the batch that the ranks compare."""
        assert self.plan is not None
        if self.inputs == "rank0":
            given = functools.partial(self._split_target, args, kwargs, targeted)
            args, kwargs, target = broadcast_batch(self.mesh, given)
            compared = []
        else:
            compared = pytree.tree_leaves((args, kwargs))
            args, kwargs, target = self._split_target(args, kwargs, targeted)
        # every value is checked before the ranks compare, so that a refusal leaves no message behind
        try:
            leaves = self._captured.flat(args, kwargs)
        except ConfigError as error:
            if targeted or self.loss_fn is None:
                raise
            # models of from_pretrained(), for one, come in evaluation mode
            hint = "The pipeline is evaluating, without a target: to train, call engine.train() first"
            raise ConfigError(f"{error}. {hint}") from None
        rows = count_rows(leaves, self._is_whole)
        replica, replicas = (0, 1) if self.inputs == "replica" else (self.replica, self.replicas)
        split = functools.partial(micro_batches, rows, self.plan.microbatches, replica, replicas)
        chunks = split(leaves, self._is_whole)
        targets, target_spec = pytree.tree_flatten(target)
        parts = [pytree.tree_unflatten(one, target_spec) for one in split(targets)]
        built = self._stage_for(chunks[0])
        return (built, [built.inputs(one) for one in chunks], parts), shape_key(leaves), compared

    def _stage_for(self, flat: Sequence[object]) -> BuiltStage:
        """Return this rank's stage for micro-batches of these shapes, in the modes that the model's modules are in."""
        assert self.plan is not None
        modes = modes_of(self.model)
        key = (modes, shape_key(flat))  # a last batch may have fewer rows, and autocast other dtypes
        if key in self._built:
            self._built[key] = self._built.pop(key)  # the newest is the last
        else:
            args, kwargs = pytree.tree_unflatten(list(flat), self._captured.in_spec)
            batch = CapturedBatch(self.model, args, kwargs, self.whole)
            nodes: Sequence[Sequence[str]] = self.nodes
            if modes != self._cut_modes:  # in evaluation the graph has no dropout, and batch norms of another kind
                holders = {**self.tensors.parameter_holders, **self.tensors.buffer_holders}
                nodes = evaluation_stages(batch.atoms.graph(batch.rows), nodes, holders)
            self._built[key] = BuiltStage(batch, nodes, self.mesh, self.plan.recompute, not self.training)
            self._limit_stages()
        return self._built[key]

    def _limit_stages(self) -> None:
        """Warn if stages were built for many shapes, which takes time for each, and drop those that were used least
        lately."""
        if len(self._built) == MANY_SHAPES and self.backend.rank == 0:
            warn(
                f"this pipeline was built anew for {MANY_SHAPES} shapes of batches, or numbers among the model's "
                "arguments, and each takes seconds: pad batches to few lengths, and pass a number that changes as a "
                "tensor"
            )
        while len(self._built) > MOST_SHAPES:
            del self._built[next(iter(self._built))]

    # -- training -----------------------------------------------------------------------------------------

    def _make_loss(self, built: BuiltStage) -> Callable[[Sequence[object], object], torch.Tensor]:
        """Return the loss function of the schedule, times the loss scale."""
        scale = self.gradients.loss_scale

        def loss(flat: Sequence[object], target: object) -> torch.Tensor:
            """Return the loss of a micro-batch, times the loss scale."""
            output = built.output(flat)
            value = output if self.loss_fn is None else self.loss_fn(output, target)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ConfigError("the loss must be a tensor of one element, a mean over rows: give loss_fn=")
            wide = value.to(torch.promote_types(value.dtype, torch.float32))  # a scaled float16 may be infinite
            return wide * scale  # a new tensor: that of mse_loss keeps the memory of all errors

        return loss

    def _run_schedule(self, args: Args, kwargs: Kwargs) -> float:
        """Run the schedule. It leaves only its own gradients in ``p.grad``, as means over micro-batches, times the loss
        scale. Return this rank's share of the loss, the mean over all rows."""
        assert self.plan is not None
        with self.mesh.naming_failed_rank(f"step {self.steps} of the pipeline"):
            built, chunks, targets = self._begin_call(args, kwargs, True)
            self.gradients.start_loss_scale(self.device)
            with self._noting_failure():
                losses = run_schedule(self.plan.schedule, built.stage, chunks, targets, self._make_loss(built))
        self.steps += 1
        factor = self.gradients.factor(self.plan.microbatches)
        with torch.no_grad():
            for p in self.parameters.values():
                if p.grad is not None and factor != 1.0:
                    p.grad.mul_(factor)
        shares = len(losses) * self.mesh.replicas[-1] * self.gradients.loss_scale
        return sum(float(one) for one in losses) / shares if losses else 0.0

    def step(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Clear gradients, run forward and backward of all micro-batches, exchange, and update.

        Args:
            args, kwargs: arguments of the model; with a ``loss_fn`` the last of ``args`` is the target, ``(x, target)``
                or ``(target, **batch)``.

        Returns:
            The mean loss over all rows, on every rank.
        """
        if not self.training:
            raise ConfigError("the pipeline is evaluating: call engine.train() before engine.step()")
        if self.plan is None:
            self._set_up(*self._split_target(args, kwargs)[:2])
        if not self._pending:
            self.gradients.zero_grad()
        with self.gradients.computing() as computed:
            share = self._run_schedule(args, kwargs)
        self.gradients.add(computed)
        self._pending = not self._exchanging
        if self._exchanging:
            self.gradients.exchange()  # before the all-reduce of the loss: earlier stages still run their schedule
        loss = torch.tensor(self.mesh.all_reduce_sum(share))
        if self._exchanging:
            self.gradients.step()
            if self.scaler is not None:
                self.scaler.update()
        return loss

    def __call__(self, *args: object, **kwargs: Any) -> Any:
        """Run the model. In training: run forward and backward of all micro-batches, and return the loss, whose
        ``backward()`` adds the gradients to ``p.grad``. In evaluation: return the model's outputs for this replica's
        rows, on every rank."""
        if not self.training:
            return self.evaluate(*args, **kwargs)
        if self.plan is None:
            self._set_up(*self._split_target(args, kwargs)[:2])
        with self.gradients.computing() as computed:
            share = self._run_schedule(args, kwargs)
        value = torch.tensor(self.mesh.all_reduce_sum(share))
        anchor = torch.zeros((), requires_grad=True)  # makes autograd call the loss's backward
        return Loss.apply(anchor, value, self.gradients, computed)  # type: ignore[no-untyped-call]

    def _split_target(self, args: Args, kwargs: Kwargs, targeted: bool = True) -> tuple[Args, Kwargs, object]:
        """Return the model's arguments and the target of a call, which has one if it is ``targeted``."""
        if self.loss_fn is None or not targeted:
            return args, kwargs, None
        if len(args) < (1 if kwargs else 2):
            raise ConfigError(
                "call it with the model's arguments and then the target that loss_fn takes, without a name: "
                "(x, target), or (target, **batch) where all of the model's are named"
            )
        return args[:-1], kwargs, args[-1]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``step()`` only accumulates; the next one outside exchanges and updates."""
        exchanging_before = self._exchanging  # contexts may be nested
        self._exchanging = False
        try:
            yield
        finally:
            self._exchanging = exchanging_before

    def exchange(self) -> None:
        """Exchange the gradients, so that ``p.grad`` holds the means over all rows. ``optimizer.step()`` does so if it
        was not done before."""
        self.gradients.exchange()

    def metrics(self) -> dict[str, float]:
        """Return numbers of this rank's exchange with the replicas of its stage, for a logger, since the last call;
        see :mod:`grace.session.metrics`. Messages between stages are not counted. No collective."""
        return self.gradients.metrics()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._pending = False
        if self.plan is not None:
            self.gradients.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients as ``torch.nn.utils.clip_grad_norm_`` of the whole model does. Exchange first.

        Returns:
            The norm before clipping, on every rank.
        """
        self.exchange()
        return self.gradients.clip_norm(float(max_norm), float(norm_type))

    # -- state --------------------------------------------------------------------------------------------

    def parameter(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter or buffer, on every rank, from the rank that has it. Every rank must call it."""
        self._check_planned()
        return self.tensors.parameter(name)

    def gradient(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter's gradient, zeros if there is none. Every rank must call it.

        It is the mean over all rows once the gradients are exchanged: by :meth:`exchange`, :meth:`clip_grad_norm_`, or
        the optimizer's step. Before, it is that of replica 0's rows, and of a parameter that stages share that of the
        first of them.
        """
        self._check_planned()
        return self.tensors.gradient(name)

    def state_dict(self) -> dict[str, object]:
        """Return the whole model's state, as ``model.state_dict()`` does, on every rank. Buffers are replica 0's. Every
        rank must call it."""
        self._check_planned()
        return self.tensors.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a whole model's state, of a plain program or of another plan. Every rank must call it, with the same
        state. Extra states of modules (``get_extra_state``) cannot change once the model is cut: load them into the
        model before.

        Raises:
            ConfigError: names, shapes, kinds or extra states are not the model's; nothing was changed.
            RankError: another rank refused its state, or was given another one; nothing was changed.
        """
        self._check_planned()
        self.tensors.load_state_dict(state)

    def optimizer_state_dict(self) -> OptimizerStateDict:
        """Return the optimizers' state of all stages as that of one optimizer of the whole model, whose parameters are
        numbered group by group in the model's order; with their ``names``, and the Grace state of all replicas. Every
        rank must call it."""
        self._check_planned()
        return pipeline_state.optimizer_state_dict(self.tensors, self.gradients)

    def load_optimizer_state_dict(self, saved: OptimizerStateDict, memory: str = "strict") -> None:
        """Load a result of :meth:`optimizer_state_dict`, of this plan or another. Every rank must call it.

        Args:
            saved: the state of the whole model.
            memory: treatment of memories that do not fit, as for a distributed optimizer's ``load_state_dict``.

        Raises:
            ConfigError: the state is of another model, or damaged; nothing was changed.
            RankError: another rank refused its state, or ranks load different ones; nothing was changed.
        """
        self._check_planned()
        pipeline_state.load_optimizer_state_dict(self.tensors, self.gradients, saved, memory)

    # -- evaluation ---------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """True if the model is in training mode. Single modules may be in another one: ``model.norm.eval()``."""
        return self.model.training

    def train(self, mode: bool = True) -> "Pipeline":
        """Set the model's training mode by ``model.train``."""
        self.model.train(mode)
        return self

    def eval(self) -> "Pipeline":
        """Set the model's evaluation mode, as ``Module.eval`` does."""
        return self.train(False)

    def evaluate(self, *args: object, gather: bool = False, **kwargs: object) -> Any:
        """Return the model's outputs, without gradients, on every rank: rows of all micro-batches. Sums over rows are
        added up, and other outputs that have no rows, such as a mean loss, are averaged over micro-batches.

        Args:
            args, kwargs: arguments of the model, without a target.
            gather: True to return the outputs for the rows of all replicas instead of this one's.
        """
        if self.plan is None:
            self._set_up(args, kwargs)
        with self.mesh.naming_failed_rank("the pipeline's evaluation"):
            built, chunks, _ = self._begin_call(args, kwargs, False)
            with self._noting_failure():
                outputs = run_forward(built.stage, chunks)
        by_replica = self.inputs == "replica"
        # a rank that passed the whole batch gets the outputs of the whole batch
        every = gather or not by_replica
        found = gather_outputs(outputs, built.output_axes, built.summed_outputs, self.mesh, every, by_replica)
        return built.output(found)
