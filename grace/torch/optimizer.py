"""The distributed optimizer: the user's own optimizer, whose gradients are exchanged compressed."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from grace.backends.horovod import Compression, compressor_for
from grace.backends.runtime import backend_or_current, check_group, current
from grace.backends.torch_distributed import TorchBackend
from grace.core.arguments import accept_grace_argument, optimizer_type_error
from grace.core.backend import Backend
from grace.core.communicator import CommunicatorArg, CompressorArg, MemoryArg
from grace.core.outer import OuterArg
from grace.core.subclassing import with_mixins
from grace.errors import ConfigError, ExchangeError, warn
from grace.exchange.bucket import Bucket
from grace.exchange.tracing import recorder
from grace.session.exchange_plan import ExchangePlan
from grace.session.settings import ReduceOp, Settings
from grace.session.step_runner import StepRunner
from grace.strategy.choices import Choices
from grace.strategy.execution import StrategyArg
from grace.strategy.resources import ResourcesArg
from grace.torch.closure_sync import synchronize_closure
from grace.torch.gradient_hooks import gradient_hook, not_compiled, register_session
from grace.torch.lifecycle import Closable, attach
from grace.torch.member import MemberMixin
from grace.torch.parameters import NamedParameters
from grace.torch.pickling import allow_steps
from grace.torch.session import CHANGED_EARLY, Session
from grace.torch.step_hooks import initializing
from grace.torch.wrappers import check_unwrapped

if TYPE_CHECKING:  # Horovod need not be installed
    from horovod.common.process_sets import ProcessSet

    from grace.backends.horovod_torch import TorchHorovodBackend


class HookedSession(Session):
    """A session whose exchanges start from hooks on the parameters.

    A parameter's hook counts backward passes. When every parameter of the next bucket has had all of its passes, the
    exchange of that bucket starts. ``finish_exchange`` starts the remaining buckets, awaits all of them, and writes the
    means back.
    """

    def __init__(self, *args: Any, passes: int, **options: Any):
        super().__init__(*args, passes=passes, **options)
        self.passes = passes
        self.in_no_sync = False
        self.synchronized = False
        self.warned_of_moved = False
        self.count_lock = threading.RLock()
        """Lock of the counts: autograd runs the hooks of each device's parameters in a thread of its own."""
        self.session_number = register_session(self)
        self._reset()
        for name, p in self.parameters.items():
            self.hooks.append(p.register_post_accumulate_grad_hook(gradient_hook(self.session_number, name)))

    def _reset(self) -> None:
        """Clear the state of the current step."""
        self.pass_counts: dict[str, int] = {}
        """Number of backward passes by parameter name; 0 if hooks of the program removed all gradients."""
        self.last_gradients: dict[str, torch.Tensor] = {}
        self.last_versions: dict[str, int] = {}
        self.parameter_versions: dict[str, int] = {}
        """Versions of the parameters whose gradients are exchanged, by name, when the gradients were computed."""
        self.replaced_outside = False
        self.in_graph: set[str] = set()
        self.waits_for_graph = False
        """True if this step's exchanges start only after the compiled graph has ended."""
        self.missing_parameters = self.bucket_parameters.copy()
        self.gradient_versions = {}
        self.checked = False

    def mark_ready_in_graph(self, name: str, gradient: torch.Tensor) -> None:
        """Mark a gradient as ready from within a compiled graph.

        The graph writes ``p.grad`` at its end only. If ``p.grad`` is None, this gradient will become ``p.grad``. If
        ``p.grad`` has a tensor already, the sum in ``gradient`` may be overwritten before a bucket is complete, so
        exchanges are delayed until the graph has ended.
        """
        if not self.hooks:  # the optimizer was closed after the graph was compiled
            return
        p = self.parameters[name]
        self.in_graph.add(name)
        if p.grad is None:
            p.grad = gradient
        elif p.grad is not gradient:
            self.waits_for_graph = True
        self.mark_ready(name, gradient)

    def mark_ready(self, name: str, gradient: torch.Tensor | None) -> None:
        """Count a parameter's accumulated gradient, and start the buckets that it completes."""
        if recorder.run is not None:
            recorder.run.gradient()
        with self.count_lock:
            # The next step() must exchange this gradient, even if synchronize() has exchanged earlier ones.
            self.synchronized = self.cleared_since_step = False
            if gradient is None:  # a hook of the program removed it; what it stores instead is exchanged in step()
                self.pass_counts.setdefault(name, 0)
                return
            last = self.last_gradients.get(name)
            version = gradient._version
            shared = gradient._base is not None
            if shared:
                self.buffer_versions[id(gradient._base)] = version
            if last is not None and (gradient is not last or not (shared or version == self.last_versions[name] + 1)):
                self.replaced_outside = True  # something other than a backward pass changed or replaced the gradient
            self.last_gradients[name] = gradient
            self.last_versions[name] = version
            if self.in_no_sync:
                return
            if not self.checked:
                self.check_unchanged_optimizer()
            count = self.pass_counts.get(name, 0) + 1
            if count > self.passes:
                if not self.buckets_of[name]:
                    return  # ranks train this variable alone: no exchange has begun
                raise self._too_many_passes(name)
            self.pass_counts[name] = count
            if count == self.passes:
                self.parameter_versions[name] = self.parameters[name]._version
                missing = self.missing_parameters
                driver = self.driver
                if driver is not None and driver.steps_left:
                    driver.ready(name)
                for bucket in self.buckets_of[name]:
                    missing[bucket.index] -= 1
                if self.waits_for_graph or (driver is not None and driver.after_backward):
                    return
                # All ranks start buckets in index order, so that their collectives pair.
                for bucket in self.runner.buckets[len(self.runner.in_flight) :]:
                    if missing[bucket.index] > 0:
                        break
                    self.start_bucket(bucket)

    def _check_waiting_gradients(self, buckets: Sequence[Bucket]) -> None:
        """Refuse changes of gradients whose bucket waits for parameters that this rank leaves out: ranks would clip by
        norms of their own, and only some ranks would notice."""
        unscaled = self.grad_scaler is not None and self.unscaled
        for bucket in buckets:
            for _, name, p, _ in self.bucket_contents[bucket.index]:
                if self.pass_counts.get(name) != self.passes or name in self.in_graph:
                    continue
                last = self.last_gradients[name]
                same = last._version == self.last_versions[name] or self.changed_by_neighbours(last)
                if unscaled or p.grad is not last or not same:
                    raise self._changed_gradient(name, CHANGED_EARLY)

    def _too_many_passes(self, name: str) -> ExchangeError:
        """Return the error for a gradient that was computed again after its exchange began."""
        check_unwrapped(self.parameters)  # DDP may have wrapped the model after the optimizer was made distributed
        computed = f"the gradient of {name!r} was computed {self.passes + 1} times before step(), and its exchange has"
        if self.replaced_outside:
            return ExchangeError(
                f"{computed} begun; between the passes something else than optimizer.zero_grad() cleared or replaced "
                "gradients (model.zero_grad()?). Call optimizer.zero_grad() instead, which also drops the exchange "
                "under way, on all ranks"
            )
        return ExchangeError(
            f"{computed} begun. Accumulate with backward_passes_per_step={self.passes + 1}, or run the earlier passes "
            "under `with optimizer.no_sync():`. If one pass computes it twice (a layer in two reentrant checkpoints), "
            "give checkpoint use_reentrant=False, or run all passes under no_sync()"
        )

    def finish_exchange(self) -> None:
        """Start the remaining exchanges, await all of them, and write the means into ``p.grad``."""
        if self.driver is not None:
            self.driver.computed(self.copies)
        with recorder.phase("synchronize", "part"):
            left = self.runner.buckets[len(self.runner.in_flight) :]
            if left:  # otherwise wait_and_write_means() does this check first
                self.check_unchanged_gradients()
                self._check_waiting_gradients(left)
            if not self.checked:
                self.check_unchanged_optimizer()
            for bucket in left:
                self.start_bucket(bucket)
            try:
                self.wait_and_write_means()
            finally:
                if not self.runner.in_flight:  # the exchange is over, even if a mean could not be written (no memory)
                    self._reset()
        if self.driver is not None:
            self.driver.exchanged()
        self.synchronized = True

    def abort(self) -> None:
        """Discard the exchanges in progress, which the engine has given up."""
        super().abort()
        self._reset()

    def switch_runner(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Replace the runner and its plan, and clear the state of the current step."""
        super().switch_runner(runner, plan)
        self._reset()

    @property
    def in_progress(self) -> bool:
        """True if this step's backward passes are done but not synchronized. All ranks have the same value."""
        exchanges = bool(self.runner.buckets)  # ranks that train alone have nothing to drop
        return super().in_progress or (exchanges and self.passes in self.pass_counts.values() and not self.synchronized)

    @property
    def computed(self) -> bool:
        """True if gradients were computed since the last exchange."""
        return bool(self.pass_counts)

    def synchronize_once(self) -> None:
        """Synchronize before ``step()``, unless the user has synchronized since the last step."""
        self.check_unchanged_optimizer()
        if not self.synchronized:
            self.finish_exchange()
        self.synchronized = False
        if self.unused_means is not None:
            self.commit_used_means()

    def _warn_of_moved_parameters(self) -> None:
        """Warn once if the program has moved parameters by gradients that it drops before they are exchanged: the first
        step of SAM does so, and under DDP it would have the means."""
        if self.warned_of_moved or not self.runner.buckets or self.runner.backend.size == 1:
            return
        moved = [name for name, version in self.parameter_versions.items() if self.parameters[name]._version != version]
        if moved:
            self.warned_of_moved = True
            warn(
                f"{moved[0]!r} was changed between backward() and zero_grad(), when its gradient was still this rank's "
                "own (the first step of SAM?): each rank went another way. Call optimizer.synchronize() after that "
                "backward(), and the gradients are the means over ranks; or, if ranks are to go their own ways, run it "
                "under `with optimizer.no_sync():`, which exchanges nothing in vain"
            )

    def discard(self) -> None:
        """Await the exchanges in progress, and discard their results. Every rank must call it."""
        # Every rank that has run its backward passes completes all buckets, started or not: collectives must pair.
        if self.passes in self.pass_counts.values() and not self.synchronized:
            self._warn_of_moved_parameters()
            for bucket in self.runner.buckets[len(self.runner.in_flight) :]:
                self.start_bucket(bucket)
            with self.aborting_on_error():
                self.runner.discard()
        self._reset()
        self.synchronized = False


class DistributedMixin(Closable, MemberMixin):
    """The methods that a distributed optimizer adds to the user's optimizer, or replaces."""

    _grace: HookedSession

    @not_compiled
    def synchronize(self) -> None:
        """Finish this step's exchange: start the buckets that are left, await all, and write the means into ``p.grad``.

        Call it before clipping or unscaling, on every rank: ``optimizer.synchronize()``, ``clip_grad_norm_(...)``,
        ``optimizer.step()``. ``step()`` then exchanges nothing. It commits residuals; ``zero_grad()`` before it rolls
        them back. With ``staleness`` the means are those of an earlier step: ``step()`` keeps this step's gradients for
        a later one, and ``zero_grad()`` drops them, but not those means, which a later step applies. To drop the means,
        set ``p.grad`` to zeros and call ``step()``.
        """
        session = self._grace
        if not session.synchronized:
            with session.deferring_commit():
                session.finish_exchange()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate; the next pass outside starts the exchange."""
        session = self._grace
        before = session.in_no_sync  # contexts may be nested
        session.in_no_sync = True
        try:
            yield
        finally:
            session.in_no_sync = before

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which ``step()`` does not synchronize, as in Horovod. Grace's ``step()`` never
        synchronizes twice, so the context only checks that ``synchronize()`` was called."""
        if not self._grace.synchronized:
            raise ExchangeError("call synchronize() before `with optimizer.skip_synchronize():`")
        yield

    def join(self) -> int:
        """Return 0 on a single rank; refuse Horovod's ``join()`` for uneven data on more ranks of this engine. Under
        Horovod, :func:`grace.torch.horovod.join` does the work.

        Raises:
            ConfigError: on other engines, where several ranks train.
        """
        backend = self._grace.runner.backend
        if backend.size == 1:
            return 0
        raise ConfigError(
            f"join() lets ranks with more batches go on without this one, which only Horovod's sums can, and this runs "
            f"over {backend.describe()}. Give every rank as many batches (DistributedSampler pads, or drop_last=True), "
            "or end together: leave the loop where grace.allreduce(torch.tensor(float(more))) < 1, if more says "
            "whether this rank has another batch"
        )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Value of torch's attribute of this name, which ``GradScaler.step()`` reads before it unscales gradients and
        looks for ``found_inf``. The exchange must be over by then, so reading the attribute synchronizes: all ranks
        find the same overflows, in the means, and skip the same steps."""
        if self._grace.computed:
            self.synchronize()
        return self.__dict__.get("_step_supports_amp_scaling", False)

    @not_compiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients. An exchange in progress is completed and its result is dropped."""
        # First, because the buckets that are left start here, and read the gradients.
        self._grace.discard()
        self._grace.on_zero_grad()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]


@accept_grace_argument
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters = None,
    compressor: CompressorArg | None = None,
    memory: MemoryArg | None = None,
    communicator: CommunicatorArg | None = None,
    *,
    outer: OuterArg | None = None,
    period: int | None = None,
    strategy: StrategyArg | None = None,
    resources: ResourcesArg | None = None,
    backward_passes_per_step: int = 1,
    op: str | int = "average",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    process_group: "dist.ProcessGroup | None" = None,
    process_set: "ProcessSet | None" = None,
    backend: Backend | None = None,
    grad_scaler: torch.amp.GradScaler | None = None,
    sparse_as_dense: bool = False,
    broadcast: bool = True,
    hierarchical: bool = False,
    compress_after: int = 0,
    seed: int = 0,
    bucket_bytes: int | None = None,
    group_bytes: int | None = None,
    compression: Compression | None = None,
) -> Any:
    """Make an optimizer exchange its gradients, compressed, between backward and step.

    The optimizer is changed in place and returned: it still is of its class, and ``step()`` first replaces each
    ``p.grad`` by the mean over ranks (or another aggregate that the method defines). Exchanges start during backward.
    All ranks must make the same call. Under Horovod the optimizer is Horovod's own DistributedOptimizer, with Grace's
    exchange in it.

    Args:
        optimizer: any torch optimizer.
        named_parameters: ``model.named_parameters()``; state and messages use these names. Or the model itself:
            then sparse gradients (``Embedding(sparse=True)``) are exchanged by rows, and buffers start equal.
        compressor: spec ("topk(ratio=0.01)"), dict or object; "none" if left out.
        memory: spec, dict or object; the compressor's default if left out.
        communicator: spec, dict or object; an object holds all three. If left out, the compressor's default for so many
            ranks (:func:`~grace.communicators.choice.break_even`). Such an object may also be given as in GRACE: in
            the second place, or as ``grace=``.
        outer: spec or object of an outer optimizer ("nesterov(lr=0.7, momentum=0.6)"; "none" averages): ranks train
            alone, and exchange how far they have drifted, by these three, instead of gradients. See ``anchor()`` and
            ``flush()`` of the optimizer. With it ``named_parameters`` may be a model that ``fully_shard`` has sharded:
            each rank exchanges its own parts.
        period: iterations between two such exchanges.
        strategy: a method for each variable, instead of one for all: a strategy file's path, a
            :class:`~grace.strategy.Strategy`, or a builder's spec ("parallax(compressor=qsgd)") or object. Rank 0's
            strategy counts. If left out, the file that ``grace launch --strategy`` names.
        resources: the cluster that a builder builds for: a resource file's path, or
            :class:`~grace.launch.cluster.Resources`; it must describe the ranks of this run. Rank 0's file
            counts. If left out, the file that ``grace launch -r`` names.
        backward_passes_per_step: exchange after this many backward passes, whose gradients add up.
        op: "average" or "sum" over ranks (or Horovod's constants; Adasum is refused).
        gradient_predivide_factor: divide gradients by it before the exchange, and multiply the average with it.
        num_groups, groups: parameters that may share a collective: number of sets, or lists of parameters.
            By default all parameters that become ready one after the other, up to ``bucket_bytes``.
        process_group: a torch.distributed group; all ranks if left out. For a sharded model that of the replicate
            axis, ``mesh.get_group("replicate")``.
        process_set: a Horovod process set; all ranks if left out.
        backend: a Backend object, instead of that of ``grace.init()``.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        sparse_as_dense: exchange sparse gradients as dense ones (they are refused otherwise, unless
            ``named_parameters`` is the model).
        broadcast: start every rank from rank 0's values: all named parameters, frozen ones too, and, if
            ``named_parameters`` is the model, its buffers. As Horovod's ``broadcast_parameters(model.state_dict())``
            this happens once, at the start: unlike DDP, buffers (BatchNorm's statistics) are not sent again at
            every step.
        hierarchical: the ranks of a node average their gradients first, uncompressed, and one of them exchanges for
            all; for several ranks on each node of a slow network. Ranks are on one node if their hosts' names (or
            GRACE_NODE) are the same. Not for Horovod.
        compress_after: steps that are exchanged uncompressed first; memories begin with the compression. Not for
            methods that apply momentum, and not for ``strategy="auto"``.
        seed: seed of the random numbers of stochastic methods; the same on all ranks.
        bucket_bytes: bytes on the wire that a collective carries; if left out, enough to keep the link busy
            (:class:`grace.session.bucket_limits.Limits`): 1 to 2 MB of a model of 100 MB, and 25 MiB uncompressed.
        group_bytes: largest number of bytes of gradient that share a collective, before compression.
        compression: ``grace.Compression.none`` or ``.fp16``, as in scripts for Horovod. All other values are
            refused, because ``compressor`` is Grace's.

    Raises:
        ConfigError: the arguments cannot work; nothing was exchanged.
        RankError: the ranks' arguments differ, or another rank's cannot work.

    >>> import grace
    >>> backend = grace.init("local")
    >>> model = torch.nn.Linear(10, 10)
    >>> opt = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> opt = grace.DistributedOptimizer(opt, model.named_parameters(), compressor="topk(ratio=0.1)")
    >>> isinstance(opt, torch.optim.SGD)
    True
    >>> model(torch.ones(1, 10)).sum().backward()
    >>> opt.step()
    >>> int((model.weight.grad != 0).sum())
    10
    >>> grace.shutdown()
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise optimizer_type_error(optimizer)
    if isinstance(optimizer, MemberMixin):
        raise ConfigError("this optimizer is distributed already")
    compressor = compressor_for(optimizer, compression, compressor)
    backend = _backend(process_group, process_set) if backend is None else backend_or_current(backend)
    reduction = ReduceOp(op, gradient_predivide_factor)
    options: dict[str, Any] = {
        "passes": backward_passes_per_step,
        "groups": num_groups if groups is None else groups,
        "grad_scaler": grad_scaler,
        "settings": Settings(
            reduction=reduction,
            bucket_bytes=bucket_bytes,
            group_bytes=group_bytes,
            seed=seed,
            sparse_as_dense=sparse_as_dense,
            broadcast=broadcast,
            hierarchical=hierarchical,
            compress_after=compress_after,
        ),
    }
    choices = Choices(compressor, memory, communicator, strategy, resources, outer, period)
    if backend.name == "horovod":
        from grace.torch.horovod import distribute

        horovod = cast("TorchHorovodBackend", backend)
        return distribute(optimizer, named_parameters, choices, horovod, options, step_pre_hook, step_post_hook)
    # close() removes what is added from here on.
    attributes_before = set(vars(optimizer))
    session = HookedSession(optimizer, named_parameters, choices, backend, **options)
    allow_steps(optimizer)  # a copy of a distributed optimizer refuses to step until then
    cls = type(optimizer)
    # In place, since schedulers and scalers made earlier hold this object; and a subclass, so that isinstance() holds.
    optimizer.__class__ = with_mixins(cls, DistributedMixin)
    optimizer._grace = session  # type: ignore[attr-defined]
    attach(optimizer, session, step_pre_hook, step_post_hook, attributes_before)
    return optimizer


def _backend(process_group: "dist.ProcessGroup | None", process_set: "ProcessSet | None") -> Backend:
    """Return the engine for a torch.distributed group or a Horovod process set; that of ``grace.init()`` without
    one."""
    if process_group is not None and process_set is not None:
        raise ConfigError("give a process_group (torch.distributed) or a process_set (Horovod), not both")
    if process_set is not None:
        from grace.backends.horovod_torch import TorchHorovodBackend

        check_group(TorchHorovodBackend())
        return TorchHorovodBackend(process_set)
    if process_group is None:
        return current()
    check_group(TorchBackend())
    return TorchBackend(process_group)


def step_post_hook(optimizer: Any, args: tuple[object, ...], kwargs: dict[str, object], inner: bool) -> None:
    """Count the optimizer's step, and run the outer rounds that are due."""
    if inner:  # a part of an outer step()
        return
    if recorder.run is not None:
        recorder.run.update_ends()
    session = optimizer._grace
    session.count_step()
    if session.outer_rounds is not None and not initializing():  # parameters may be loaded before they are anchors
        session.run_rounds()
    if recorder.run is not None:
        recorder.run.end_step()
    if session.driver is not None:
        session.driver.stepped()


def step_pre_hook(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool) -> Any:
    """Synchronize before the user's step. If ``step()`` has a closure, synchronize after each evaluation of the closure
    instead. An inner level of ``step()`` uses the means that exist, unless an outer level computed gradients since."""
    session = optimizer._grace
    if session.outer_rounds is not None:
        session.before_update()
    stepping, *arguments = args  # torch passes step()'s arguments to the hook with the optimizer first
    closure = kwargs.get("closure", arguments[0] if arguments else None)
    if closure is None:
        if not inner or session.computed:
            session.synchronize_once()
            if recorder.run is not None:
                recorder.run.update_begins()
        return None

    closure = synchronize_closure(closure, session, inner)
    if arguments:
        return (stepping, closure, *arguments[1:]), kwargs
    return args, {**kwargs, "closure": closure}
