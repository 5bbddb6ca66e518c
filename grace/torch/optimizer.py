"""The distributed optimizer: the user's own, whose gradients are exchanged compressed."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from grace.backends.horovod import compressor_for
from grace.backends.runtime import check_group, current
from grace.backends.torch_distributed import TorchBackend
from grace.core.arguments import accept_grace_argument, optimizer_type_error
from grace.core.backend import Backend
from grace.errors import ConfigError, ExchangeError
from grace.exchange.tracing import recorder
from grace.session.plan import ExchangePlan
from grace.session.settings import ReduceOp, Settings
from grace.session.step_runner import StepRunner
from grace.strategy.choices import Choices
from grace.torch.closure_sync import synchronized
from grace.torch.gradients import check_untouched
from grace.torch.hooks import enlist, gradient_hook
from grace.torch.lifecycle import Closable, begin
from grace.torch.session import Session
from grace.torch.state_dict import StateMixin
from grace.torch.step_hooks import initializing
from grace.torch.wrappers import check_unwrapped


class HookedSession(Session):
    """A session whose exchanges start from hooks on the parameters.

    A parameter's hook counts backward passes; when every parameter of the next bucket has had them all, the
    bucket's exchange starts. ``synchronize`` starts what is left, awaits everything, and writes the means back.
    """

    def __init__(self, *args: Any, passes: int, **options: Any):
        super().__init__(*args, passes=passes, **options)
        self.passes = passes
        self.paused = False
        self.synchronized = False
        self.number = enlist(self)
        self._reset()
        for name, p in self.parameters.items():
            self.hooks.append(p.register_post_accumulate_grad_hook(gradient_hook(self.number, name)))

    def _reset(self) -> None:
        self.counts: dict[str, int] = {}
        """Backward passes of the parameters that had some; 0 if hooks of the program's took all gradients."""
        self.seen: dict[str, torch.Tensor] = {}
        self.seen_versions: dict[str, int] = {}
        self.cleared = False
        self.in_graph: set[str] = set()
        """Parameters whose gradients came within a compiled graph, which may put another tensor into ``p.grad``."""
        self.held_back = False
        """Whether this step's exchanges start after the graph."""
        self.waiting = self.waits.copy()
        self.next_bucket = 0
        self.versions = {}
        self.checked = False

    def offer_in_graph(self, name: str, gradient: torch.Tensor) -> None:
        """The same within a compiled graph. That writes ``p.grad`` at its end only: where there is none yet, it will be
        this very gradient; what is added to one that is there may not last until a bucket is complete."""
        if not self.hooks:  # they were taken away since the graph was made
            return
        p = self.parameters[name]
        self.in_graph.add(name)
        if p.grad is None:
            p.grad = gradient
        elif p.grad is not gradient:
            self.held_back = True
        self.offer(name, gradient)

    def offer(self, name: str, gradient: torch.Tensor | None) -> None:
        """A parameter's gradient has accumulated: start the buckets that waited for it."""
        if recorder.run is not None:
            recorder.run.gradient()
        self.synchronized = self.idle = False
        if gradient is None:  # a hook of the program's took it: what it puts into p.grad instead is exchanged in step()
            self.counts.setdefault(name, 0)
            return
        last, version = self.seen.get(name), gradient._version
        if last is not None and (gradient is not last or version != self.seen_versions[name] + 1):
            self.cleared = True  # by something but a backward pass
        self.seen[name], self.seen_versions[name] = gradient, version
        if self.paused:
            return
        if not self.checked:
            self.check()
        count = self.counts.get(name, 0) + 1
        if count > self.passes:
            raise self._too_many(name)
        self.counts[name] = count
        if count == self.passes:
            waiting, auto = self.waiting, self.auto
            if auto is not None and auto.left:
                auto.ready(name)
            for bucket in self.buckets_of[name]:
                waiting[bucket.index] -= 1
            if self.held_back or (auto is not None and auto.holds):
                return
            while self.next_bucket < len(waiting) and waiting[self.next_bucket] == 0:
                self._start_next()

    def _too_many(self, name: str) -> ExchangeError:
        check_unwrapped(self.parameters)  # since the optimizer was made distributed
        computed = f"the gradient of {name!r} was computed {self.passes + 1} times before step(), and its exchange has"
        if self.cleared:
            return ExchangeError(
                f"{computed} begun; between the passes something else than optimizer.zero_grad() cleared or replaced "
                "gradients (model.zero_grad()?). Call optimizer.zero_grad() instead, which also drops the exchange "
                "under way, on all ranks"
            )
        return ExchangeError(
            f"{computed} begun. Accumulate with backward_passes_per_step={self.passes + 1}, or run the earlier passes "
            "under `with optimizer.no_sync():`"
        )

    def _start_next(self) -> None:
        self.start(self.runner.buckets[self.next_bucket])
        self.next_bucket += 1

    def synchronize(self) -> None:
        """Exchange what is not exchanged yet and write the means into ``p.grad``."""
        if self.auto is not None:
            self.auto.computed(self.copies)
        with recorder.phase("synchronize", "part"):
            if self.next_bucket < len(self.runner.buckets):  # else nothing starts before finish() looks
                check_untouched(self)
            if not self.checked:
                self.check()
            while self.next_bucket < len(self.runner.buckets):
                self._start_next()
            self.finish()
            self._reset()
        if self.auto is not None:
            self.auto.exchanged()
        self.synchronized = True

    def abandon(self) -> None:
        """Forget what was under way, which the engine has given up."""
        super().abandon()
        self._reset()

    def take(self, runner: StepRunner, plan: ExchangePlan) -> None:
        """Go on by another plan's runner."""
        super().take(runner, plan)
        self._reset()

    @property
    def begun(self) -> bool:
        """Whether this step's backward passes are done, which all ranks say alike, and not yet synchronized."""
        return super().begun or (self.passes in self.counts.values() and not self.synchronized)

    @property
    def computed(self) -> bool:
        """True if gradients were computed since the last exchange."""
        return bool(self.counts)

    def before_step(self) -> None:
        """``step()`` is about to run: synchronize unless the user has done it since the last one."""
        self.check()
        if not self.synchronized:
            self.synchronize()
        self.synchronized = False
        if self.unused is not None:
            self.means_used()

    def drop(self) -> None:
        """Let exchanges under way end, and drop what they brought; every rank must call it."""
        # every rank that has run its backward passes comes here, whether it has begun a bucket or not
        if self.passes in self.counts.values() and not self.synchronized:
            while self.next_bucket < len(self.runner.buckets):
                self._start_next()
            with self.giving_up():
                self.runner.discard()
        self._reset()
        self.synchronized = False


class DistributedMixin(Closable, StateMixin):
    """The methods that a distributed optimizer has beside, or instead of, the user's optimizer's."""

    _grace: HookedSession

    def synchronize(self) -> None:
        """Await the exchange, so that ``p.grad`` holds the means: before clipping or unscaling."""
        session = self._grace
        if not session.synchronized:
            with session.leaving_unused():
                session.synchronize()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context only accumulate; the next one outside starts the exchange."""
        session = self._grace
        before, session.paused = session.paused, True
        try:
            yield
        finally:
            session.paused = before

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Horovod's spelling: ``step()`` in this context does not synchronize, because you have. Grace's
        ``step()`` knows that by itself."""
        if not self._grace.synchronized:
            raise ExchangeError("call synchronize() before `with optimizer.skip_synchronize():`")
        yield

    def join(self) -> int:
        """Horovod's ``join()``, for uneven data: under Horovod it works (:func:`grace.torch.horovod.join`).

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
        """``GradScaler.step()`` asks this before it unscales gradients, which the exchange must be over by."""
        if self._grace.computed:
            self.synchronize()
        return self.__dict__.get("_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; an exchange under way is completed and its result dropped."""
        self._grace.drop()
        self._grace.gradients_cleared()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]


@accept_grace_argument
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: torch.nn.Module | Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compressor: Any = None,
    memory: Any = None,
    communicator: Any = None,
    *,
    strategy: Any = None,
    resources: Any = None,
    backward_passes_per_step: int = 1,
    op: Any = "average",
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    process_group: Any = None,
    process_set: Any = None,
    backend: Backend | None = None,
    grad_scaler: Any = None,
    sparse_as_dense: bool = False,
    broadcast: bool = True,
    hierarchical: bool = False,
    compress_after: int = 0,
    seed: int = 0,
    bucket_bytes: int | None = None,
    group_bytes: int | None = None,
    compression: Any = None,
) -> Any:
    """Make an optimizer exchange its gradients, compressed, between backward and step.

    The optimizer is changed in place and returned: it still is of its class, and ``step()`` first replaces
    each ``p.grad`` by the mean over ranks (or what the method defines). Exchanges start during backward.
    All ranks must make the same call. Under Horovod the optimizer is Horovod's own DistributedOptimizer, with
    Grace's exchange in it.

    Args:
        optimizer: any torch optimizer.
        named_parameters: ``model.named_parameters()``; names are what state and messages are keyed by. Or the model
            itself: then sparse gradients (``Embedding(sparse=True)``) are exchanged by rows, and buffers start equal.
        compressor: spec ("topk(ratio=0.01)"), dict or object; "none" if left out.
        memory: the same; the compressor's default if left out.
        communicator: the same, or a Communicator object that holds all three; the compressor's default for so many
            ranks (:func:`~grace.communicators.choice.break_even`). Such an object may also be given as in GRACE: in
            the second place, or as ``grace=``.
        strategy: how each variable is exchanged, instead of one method for all: a strategy file's path, a
            :class:`~grace.strategy.Strategy`, or a builder's spec ("parallax(compressor=qsgd)") or object. Rank 0's
            counts. If nothing is given, the file that ``grace launch --strategy`` names.
        resources: the cluster that a builder builds for: a resource file's path, or
            :class:`~grace.launch.cluster.Resources`; it must describe the ranks that there are. Rank 0's counts. If
            nothing is given, the file that ``grace launch -r`` names.
        backward_passes_per_step: exchange after this many backward passes, whose gradients add up.
        op: "average" or "sum" over ranks (or Horovod's constants; Adasum is refused).
        gradient_predivide_factor: divide gradients by it before the exchange, and multiply the average with it.
        num_groups, groups: parameters that may share a collective: how many sets, or lists of parameters.
            By default all that become ready one after the other, up to ``bucket_bytes``.
        process_group: a torch.distributed group; all ranks if left out.
        process_set: a Horovod process set; likewise.
        backend: a Backend object, instead of that of ``grace.init()``.
        grad_scaler: the ``torch.amp.GradScaler`` in use, so that memories follow the loss scale.
        sparse_as_dense: exchange sparse gradients as dense ones (they are refused otherwise, unless
            ``named_parameters`` is the model).
        broadcast: start every rank from rank 0's values: all parameters that are named, frozen ones too, and, if
            ``named_parameters`` is the model, its buffers. As Horovod's ``broadcast_parameters(model.state_dict())``
            this happens once, at the start: unlike DDP, buffers (BatchNorm's statistics) are not sent again at
            every step.
        hierarchical: the ranks of a node average their gradients first, uncompressed, and one of them exchanges for
            all; for several ranks on each node of a slow network. Ranks are on one node if their hosts' names (or
            GRACE_NODE) are the same. Not for Horovod.
        compress_after: steps that are exchanged uncompressed first; memories begin with the compression. Not for
            methods that apply momentum, and not for ``strategy="auto"``.
        seed: of the random numbers of stochastic methods; the same on all ranks.
        bucket_bytes: bytes on the wire that a collective carries; if left out, as many as keep the link busy
            (:class:`grace.session.bucketing.Limits`): 1 to 2 MB of a model of 100 MB, and 25 MiB uncompressed.
        group_bytes: bytes of gradient that share a collective at most, whatever is sent of them.
        compression: ``grace.Compression.none`` or ``.fp16``, as in scripts for Horovod; whatever else is refused,
            because ``compressor`` is Grace's.

    Raises:
        ConfigError: what was given cannot work; nothing was exchanged.
        RankError: the ranks gave different things, or another rank's cannot work.

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
    if isinstance(optimizer, StateMixin):
        raise ConfigError("this optimizer is distributed already")
    compressor = compressor_for(optimizer, compression, compressor)
    if backend is None:
        backend = _backend(process_group, process_set)
    reduction = ReduceOp(op, gradient_predivide_factor)
    options = {
        "passes": backward_passes_per_step,
        "groups": num_groups if groups is None else groups,
        "grad_scaler": grad_scaler,
        "settings": Settings(
            reduction, bucket_bytes, group_bytes, seed, sparse_as_dense, broadcast, hierarchical, compress_after
        ),
    }
    choices = Choices(compressor, memory, communicator, strategy, resources)
    if backend.name == "horovod":
        from grace.torch.horovod import distribute

        return distribute(optimizer, named_parameters, choices, backend, options, before_step, after_step)
    had = set(vars(optimizer))
    session = HookedSession(optimizer, named_parameters, choices, backend, **options)
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (DistributedMixin, cls), {"__module__": cls.__module__})
    optimizer._grace = session  # type: ignore[attr-defined]
    begin(optimizer, session, before_step, after_step, had)
    return optimizer


def _backend(process_group: Any, process_set: Any) -> Backend:
    if process_group is not None and process_set is not None:
        raise ConfigError("give a process_group (torch.distributed) or a process_set (Horovod), not both")
    if process_set is not None:
        from grace.backends.horovod_torch import HorovodBackend

        check_group(HorovodBackend())
        return HorovodBackend(process_set)
    if process_group is None:
        return current()
    check_group(TorchBackend())
    return TorchBackend(process_group)


def after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool) -> None:
    """Average what ranks train on their own, when it is time to."""
    if inner or initializing(optimizer):
        return
    if recorder.run is not None:
        recorder.run.update_ends()
    optimizer._grace.after_step()
    if optimizer._grace.runner.averages:
        optimizer._grace.average()
    if recorder.run is not None:
        recorder.run.end_step()
    if optimizer._grace.auto is not None:
        optimizer._grace.auto.stepped()


def before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inner: bool) -> Any:
    """Synchronize before the user's step; with a closure, after every evaluation of it instead. An inner level of the
    step uses the means that there are, unless an outer one has computed gradients since."""
    if initializing(optimizer):
        return None
    session = optimizer._grace
    stepping, *given = args  # torch hands the hook step()'s arguments with the optimizer first
    closure = kwargs.get("closure", given[0] if given else None)
    if closure is None:
        if not inner or session.computed:
            session.before_step()
            if recorder.run is not None:
                recorder.run.update_begins()
        return None

    closure = synchronized(closure, session, inner)
    if given:
        return (stepping, closure, *given[1:]), kwargs
    return args, {**kwargs, "closure": closure}
