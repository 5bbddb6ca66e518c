"""``grace.torch.Pipeline``: a model cut into stages by itself, whose replicas exchange compressed gradients."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from grace.backends.runtime import current
from grace.backends.topology import Topology, node_name
from grace.errors import ConfigError
from grace.exchange.tracing import recorder
from grace.partition.exchange import documented
from grace.partition.plan import Plan
from grace.torch.parameters import broadcast_parameters
from grace.torch.pipeline import profile, schedules
from grace.torch.pipeline.atoms import Atoms
from grace.torch.pipeline.capture import call_of, capture, check_plain
from grace.torch.pipeline.cutting import Built, shapes_of
from grace.torch.pipeline.exchange import Gradients, check_options, chosen_strategy
from grace.torch.pipeline.loop import from_rank_0, gathered, hand_over
from grace.torch.pipeline.meeting import Meeting
from grace.torch.pipeline.places import Places, together
from grace.torch.pipeline.planning import Wanted, agreed, check_whole, found, state_bytes, update_seconds
from grace.torch.pipeline.rows import micro_batches, rows_of
from grace.torch.pipeline.state import StateOfStages

INPUTS = ("replica", "global", "rank0")


class Pipeline(StateOfStages):
    """A model that runs in stages on several ranks. Every rank must make it, and make the same calls.

    Args:
        model: any module that ``torch.export`` takes; it is not changed, and its parameters train in place, on each
            rank those of its stages.
        example_inputs: a tensor, a tuple of arguments, or ``(args, kwargs)`` with a tuple and a dict; the model is cut
            for these. If left out, at the first batch.
        loss_fn: of the model's output and the target; None for a model that returns its loss. It must be a mean over
            rows.
        optimizer: makes an optimizer of a list of parameters.
        compressor, residual, communicator, strategy: as for :func:`grace.DistributedOptimizer` (``residual`` is Grace's
            memory), of the exchange over each stage's replicas. A stage with one replica exchanges nothing.
        microbatches, stages: how many; or several numbers that may be, as of all that follow.
        replicas: how many of every stage, or a list with one number for each stage; or a range or set of numbers.
        schedule: "gpipe", "1f1b", "interleaved", "zero_bubble" or "zbv"; the first two are tried if left out.
        recompute: keep only what comes into a stage, and compute forward again for backward; None tries both.
        cuts: names of the last nodes of all stages but the last.
        blocks: from how many blocks stages are made; several numbers are tried each, 32 and 128 if left out.
        memory: bytes of a device; no limit if left out. ``memory_margin`` of them stays free.
        links: what connects ranks (:class:`grace.planner.network.Links`, or ``Costs``); 10 Gbit/s if left out.
        plan: a :class:`~grace.partition.plan.Plan`, or a file: written if it is not there, or else read.
        inputs: who gives which rows. "replica": all ranks of a replica give that replica's rows; "global": all ranks
            give the whole batch; "rank0": rank 0's counts. By default "replica", for which all stages have as many
            replicas, or "global" where ``replicas`` gives stages different numbers.
        grad_scaler: a ``torch.amp.GradScaler``.
        whole: names of inputs that have no rows, though their first dimension has as many elements as the batch.
        profiles: the file of measured seconds; by default one in the user's cache. False measures anew.
        init: of a model on ``meta``: called with each module whose tensors were made on this rank, to fill them; by
            default its ``reset_parameters()`` is.
        options: further ones of :func:`grace.DistributedOptimizer`: op, gradient_predivide_factor, seed, bucket_bytes,
            group_bytes, hierarchical, sparse_as_dense, compress_after.

    Raises:
        ConfigError: what was given cannot work.

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
        example_inputs: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        compressor: Any = None,
        residual: Any = None,
        communicator: Any = None,
        strategy: Any = None,
        microbatches: Any = None,
        stages: Any = None,
        replicas: Any = None,
        schedule: Any = None,
        recompute: bool | None = False,
        cuts: Sequence[str] | None = None,
        blocks: Any = None,
        memory: float | None = None,
        memory_margin: float = 0.1,
        links: Any = None,
        plan: Any = None,
        inputs: str | None = None,
        grad_scaler: Any = None,
        whole: Sequence[str] = (),
        profiles: Any = True,
        init: Any = None,
        **options: Any,
    ):
        if inputs not in (None, *INPUTS):
            raise ConfigError(f"inputs must be one of {', '.join(INPUTS)}, not {inputs!r}")
        searched = stages, replicas, microbatches, schedule, recompute, cuts, blocks, memory, memory_margin, links
        self.wanted = Wanted(*searched, compressor, residual, communicator)
        self.backend = current()
        if self.backend.name not in ("torch", "local"):
            raise ConfigError(
                f"a pipeline needs torch.distributed, which moves tensors between two ranks, and this run is over "
                f"{self.backend.name}: call grace.init('torch'), which joins ranks of torchrun, mpirun and srun"
            )
        check_plain(model)
        check_options(options, model)
        self.model, self.loss_fn, self.make_optimizer, self.scaler = model, loss_fn, optimizer, grad_scaler
        self.given_plan, self.given_inputs, self.whole = plan, inputs, whole
        self.profiles = profile.cache_file() if profiles is True else profiles or None
        named = {"compressor": compressor, "memory": residual, "communicator": communicator, "strategy": strategy}
        self.options = {**options, **{name: value for name, value in named.items() if value is not None}}
        self.training, self._syncing, self._pending = model.training, True, False
        self._built: dict[Any, Built] = {}
        self.plan: Plan | None = None
        self.steps = 0
        self.init, device = init, next((p.device for p in model.parameters()), torch.device("cpu"))
        self.device = torch.device("cpu") if device.type == "meta" else device
        if example_inputs is not None:
            self._cut(*call_of(example_inputs))

    # -- the cut ------------------------------------------------------------------------------------------

    def _cut(self, args: Any, kwargs: Any) -> None:
        """Plan, and take this rank's stages."""
        with together(self.backend):
            check_whole(self.make_optimizer)
            self.model.train(True)
            captured = capture(self.model, args, kwargs)
            atoms = Atoms(captured)
            if unknown := [name for name in self.whole if name not in captured.inputs]:
                raise ConfigError(
                    f"whole= names {unknown[0]!r}, which is no input of the model: {', '.join(captured.inputs)}"
                )
            flat, whole = captured.flat(args, kwargs), [name in self.whole for name in captured.inputs]
            rows = rows_of(flat, whole)
        self._captured = captured
        bare = atoms.graph(rows)
        unequal = isinstance(self.wanted.replicas, (list, tuple)) and len(set(self.wanted.replicas)) > 1
        each = self.given_inputs == "replica" or (self.given_inputs is None and not unequal)

        hosts = self.backend.allgather_object(node_name())

        def measure() -> Any:
            if any(p.is_meta for p in self.model.parameters()):
                return profile.estimated_by_rows(self.model, atoms, flat, whole), 0.0
            beside = hosts.count(hosts[self.backend.rank])
            costs = profile.measured_by_rows(self.model, atoms, flat, whole, self.profiles, beside)
            return costs, update_seconds(self.make_optimizer, self.device)

        nodes = Topology(hosts).ranks

        def make(measured: Any) -> Plan:
            (costs, update), state = measured, state_bytes(self.make_optimizer, self.model.parameters())
            given, names = chosen_strategy(self.options), dict(self.model.named_parameters())
            wanted = dataclasses.replace(self.wanted, strategy=documented(given, names) or given)
            return found(atoms.graph(rows, costs), nodes, rows, each, wanted, state, update)

        self.plan = plan = agreed(self.given_plan, measure, make, bare, self.backend)
        self.places = places = Places(plan, self.backend)
        self.inputs = self.given_inputs or ("replica" if places.equal else "global")
        if self.inputs == "replica" and not places.equal:
            raise ConfigError("inputs='replica' needs as many replicas of each stage: use inputs='global'")
        self.nodes = [stage.nodes for stage in plan.stages]
        self.meeting = Meeting(places, self.inputs == "replica")
        self._own_tensors(atoms)
        with places.together():
            self._materialize(self.init)
        recorder.begin(self.backend, ())  # as this rank of all, and not of its stages' replicas
        self.gradients = Gradients(self.owned, self.parameters, self.make_optimizer, places, self.scaler, self.options)
        beside = {**self.buffers, **({} if self.gradients.steps else self.parameters)}
        if beside and places.own.size > 1:
            broadcast_parameters(beside, 0, places.own)

    @property
    def optimizer(self) -> Any:
        """This rank's, of its stages' parameters; one of a number stands in where there are none (to scale)."""
        self._planned()
        return self.gradients.optimizer

    @property
    def stage(self) -> int:
        """The number of this rank's first stage."""
        self._planned()
        return self.places.stages[0]

    @property
    def replica(self) -> int:
        """Which replica of its stages this rank is; with :attr:`replicas`, what a DistributedSampler asks for."""
        self._planned()
        return self.places.replica

    @property
    def replicas(self) -> int:
        """How many replicas of this rank's stages there are."""
        self._planned()
        return self.places.replicas[self.stage]

    def _met(self, args: Any, kwargs: Any, targeted: bool) -> tuple[Built, list[Any], list[Any]]:
        """Return what :meth:`_chunks` makes of a call, whose comparison with those of the other ranks has begun;
        ``targeted`` if the last of ``args`` is the target, where there is a loss."""

        def given() -> Any:
            own, target = self._with_target(args, kwargs) if targeted else (args, None)
            return own, kwargs, target

        def prepare() -> Any:
            batch = from_rank_0(self.places, self.device, given) if self.inputs == "rank0" else given()
            made, shapes = self._chunks(*batch)
            return made, shapes, [] if self.inputs == "rank0" else pytree.tree_leaves((args, kwargs))

        mode = (1 + self._syncing) if self.training else 0
        return self.meeting.begin(prepare, mode, self.gradients)  # type: ignore[no-any-return]

    def _chunks(self, args: Any, kwargs: Any, target: Any) -> tuple[tuple[Built, list[Any], list[Any]], Any]:
        """Stages for these shapes, and of each micro-batch the inputs of this rank's stages, and the target; and the
        shapes of the batch."""
        assert self.plan is not None
        count, place = self.plan.microbatches, self.places.place(self.stage)
        captured = self._captured
        leaves, spec = captured.flat(args, kwargs), captured.in_spec
        whole = [name in self.whole for name in captured.inputs]
        rows = rows_of(leaves, whole)
        cut = micro_batches(leaves, rows, count, place, self.inputs != "replica", whole)
        first = pytree.tree_unflatten(cut[0], spec)
        key = (self.training, shapes_of(cut[0]))
        if key not in self._built:
            self.model.train(self.training)
            holders = {**self.gradients.holders, **self.buffer_holders}
            fixed = holders, self.places, self.device, self.plan.recompute, whole, self.meeting.end
            self._built[key] = Built(self.model, first[0], first[1], self.nodes, self.training, *fixed)
        built = self._built[key]
        flat = [built.captured.flat(*pytree.tree_unflatten(one, spec)) for one in cut]
        targets, target_spec = pytree.tree_flatten(target)
        last = self.places.place(len(self.nodes) - 1) if self.inputs != "replica" else place
        if self.inputs != "replica" and len(self.nodes) - 1 not in self.places.stages:
            last = place  # it computes no loss
        parts = micro_batches(targets, rows, count, last, self.inputs != "replica")
        inputs = [built.inputs(one) for one in flat]
        return (built, inputs, [pytree.tree_unflatten(one, target_spec) for one in parts]), shapes_of(leaves)

    # -- training -----------------------------------------------------------------------------------------

    def _loss(self, built: Built) -> Callable[[Any, Any], torch.Tensor]:
        scale = 1.0
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler.scale(torch.zeros((), device=self.device))  # it begins with its first loss
            scale = self.scaler.get_scale()

        def loss(flat: Any, target: Any) -> torch.Tensor:
            output = built.output(flat)
            value = output if self.loss_fn is None else self.loss_fn(output, target)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ConfigError("the loss must be a tensor of one element, a mean over rows: give loss_fn=")
            return value * scale  # a copy: mse_loss gives its value the memory of all errors

        self._scale = scale
        return loss

    def _run(self, args: Any, kwargs: Any) -> float:
        """The schedule; gradients of it alone are in ``p.grad``, as means over micro-batches, in units of the loss
        scale. Returns this rank's share of the loss, the mean over all rows."""
        assert self.plan is not None
        with self.places.telling(f"step {self.steps} of the pipeline"):
            built, chunks, targets = self._met(args, kwargs, True)
        loss = self._loss(built)
        if built.schedule is None:
            built.schedule = schedules.schedule_of(self.plan.schedule, built.stages, self.plan.microbatches, loss)
        built.schedule._loss_fn = loss
        with self.places.telling(f"step {self.steps} of the pipeline"):
            losses = schedules.run(built.schedule, built.stages, chunks, targets)
            self.meeting.end()  # of a plan of one stage, in which nothing travels
        self.steps += 1
        factor = self.gradients.factor(self.plan.microbatches)
        with torch.no_grad():
            for p in self.parameters.values():
                if p.grad is not None and factor != 1.0:
                    p.grad.mul_(factor)
        shares = len(losses) * self.places.replicas[-1] * self._scale
        return sum(float(one) for one in losses) / shares if losses else 0.0

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clear gradients, forward and backward of all micro-batches, exchange, and update.

        Args:
            args, kwargs: of the model; with a ``loss_fn`` the last of ``args`` is the target, ``(x, target)`` or
            ``(target, **batch)``.

        Returns:
            The mean loss over all rows, on every rank.
        """
        if not self.training:
            raise ConfigError("the pipeline is evaluating: call engine.train() before engine.step()")
        if self.plan is None:
            self._cut(self._with_target(args, kwargs)[0], kwargs)
        if not self._pending:
            self.gradients.zero_grad()
        share = hand_over(self, lambda: self._run(args, kwargs))
        self._pending = not self._syncing
        if self._syncing:
            self.gradients.exchange()  # before all ranks meet: stages in front still run their schedule
        loss = torch.tensor(self.places.total(share))
        if self._syncing:
            self.gradients.step()
            if self.scaler is not None:
                self.scaler.update()
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """In training: forward and backward of all micro-batches; the loss, whose ``backward()`` adds the gradients to
        ``p.grad``. In evaluation: the model's outputs of this replica's rows, on every rank."""
        if not self.training:
            return self.evaluate(*args, **kwargs)
        if self.plan is None:
            self._cut(self._with_target(args, kwargs)[0], kwargs)
        return hand_over(self, lambda: torch.tensor(self.places.total(self._run(args, kwargs))), later=True)

    def _with_target(self, args: tuple[Any, ...], kwargs: Any) -> tuple[tuple[Any, ...], Any]:
        if self.loss_fn is None:
            return args, None
        if len(args) < (1 if kwargs else 2):
            raise ConfigError(
                "call it with the model's arguments and then the target that loss_fn takes, without a name: "
                "(x, target), or (target, **batch) where all of the model's are named"
            )
        return args[:-1], args[-1]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """``step()`` in this context only accumulates; the next one outside exchanges and updates."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def exchange(self) -> None:
        """Exchange the gradients, so that ``p.grad`` holds the means over all rows; ``optimizer.step()`` does so if it
        was not done."""
        self.gradients.exchange()

    def metrics(self) -> dict[str, float]:
        """Numbers of this rank's exchange with the replicas of its stages, for a logger, since the last call; see
        :mod:`grace.session.metrics`. What stages send each other is not in it. No collective."""
        return self.gradients.metrics()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self._pending = False
        if self.plan is not None:
            self.gradients.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_`` of the whole model; it exchanges first.

        Returns:
            The norm before, on every rank.
        """
        self.exchange()
        return self.gradients.clip_norm(float(max_norm), float(norm_type))

    # -- evaluation ---------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> "Pipeline":
        """As ``Module.train``."""
        self.training = mode
        return self

    def eval(self) -> "Pipeline":
        """As ``Module.eval``."""
        return self.train(False)

    def evaluate(self, *args: Any, gather: bool = False, **kwargs: Any) -> Any:
        """The model's outputs, without gradients, on every rank.

        Args:
            args, kwargs: of the model, without a target.
            gather: of the rows of all replicas, and not of this one's alone.
        """
        if self.plan is None:
            self._cut(args, kwargs)
        with self.places.telling("the pipeline's evaluation"):
            built, chunks, _ = self._met(args, kwargs, False)
            outputs = schedules.forward(built.stages, chunks)
            self.meeting.end()
        apart = self.inputs == "replica"
        return built.output(gathered(outputs, self.places, gather or not apart, apart))
