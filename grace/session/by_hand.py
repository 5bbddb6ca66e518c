"""Steps of a communicator that the user calls by hand, as in GRACE, without an optimizer."""

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from grace.backends import runtime
from grace.core.api_names import BY_HAND
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.core.weak_calls import WeakCall
from grace.errors import ConfigError, RankError
from grace.exchange.bucket import Bucket
from grace.kernels import kernels_of
from grace.session import checkpoint, state_schema
from grace.session.agreement import compare_facts
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard
from grace.session.state_schema import SavedState
from grace.session.step_runner import StepRunner

Tensors = Tensor | Sequence[Tensor]
"""A tensor, or tensors that travel together."""
Names = str | Sequence[str]
"""Name of the tensor, or a name for each."""
_run_numbers = itertools.count(1)
"""Numbers of the communicators that join a run, in the same order on all ranks."""
FORM = "tensors, step by step"
"""Mark of a saved state of a communicator that is listed by hand."""


class WholeTensorPlan(UniformPlan):
    """Plan that exchanges every tensor whole, and by the one communicator, however small the tensor is."""

    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        communicator = self._build()
        self.name = communicator.describe()
        return [Shard(variable, variable, communicator) for variable in variables]


@dataclass(eq=False)  # a list of them is searched for one object
class PendingStep:
    """Exchange that :meth:`grace.Communicator.send_step` began.

    Attributes:
        bucket: the bucket of the tensors.
        dtypes: their dtypes, which the means get.
        single: True if the user gave one tensor, and no list.
        means: the means, once the step has ended, until the user receives them.
    """

    bucket: Bucket
    dtypes: list[str]
    single: bool
    means: list[Tensor] | None = None


class ByHand:
    """Runner of one communicator's steps. It joins the run at its first step, and leaves it at ``grace.shutdown()``.

    Tensors that are exchanged together are one bucket. At the first step of such a set the ranks compare its names, so
    these must have the same order on all ranks.

    Args:
        communicator: the communicator, which holds this object.
    """

    def __init__(self, communicator: Communicator):
        self._communicator = weakref.ref(communicator)
        self.runner: StepRunner | None = None
        self.buckets: dict[tuple[str, ...], Bucket] = {}
        self.begun: list[PendingStep] = []
        self.first = True
        """True until the first run: the communicator's context may then set seed, step and learning rate."""
        self.number = 0
        """Number of this communicator in the run, for the labels of its exchanges, which some engines pair by."""

    @property
    def communicator(self) -> Communicator:
        """The communicator whose steps these are."""
        communicator = self._communicator()
        assert communicator is not None
        return communicator

    # -- steps -----------------------------------------------------------------------------------------

    def step(self, tensors: Tensors, names: Names) -> Tensors:
        """Run one blocking step; see :meth:`grace.Communicator.step`."""
        given = [tensors] if isinstance(names, str) else list(tensors)
        try:
            run = kernels_of(given[0]).eagerly
        except (TypeError, IndexError):
            # The step itself refuses these tensors, and reports the error to ranks that are about to compare names.
            return self._run_step(given, names)
        means = run(lambda eager: self._run_step(eager, names), given)
        return means[0] if isinstance(names, str) else means

    def _run_step(self, tensors: list[Tensor], names: Names) -> list[Tensor]:
        means = self.receive(self.start(tensors[0] if isinstance(names, str) else tensors, names))
        return [means] if isinstance(names, str) else list(means)

    def start(self, tensors: Tensors, names: Names) -> PendingStep:
        """Start the exchange of tensors; see :meth:`grace.Communicator.send_step`."""
        single = isinstance(names, str)
        given, names = ([tensors], (names,)) if isinstance(names, str) else (list(tensors), tuple(names))
        backend = runtime.joined()
        if self.runner is not None and self.runner.backend is not backend:
            self.leave_run()  # the runner's run has ended, or a new one has begun
        runner = self.runner
        bucket = self.buckets.get(names)
        # Known names are checked before any collective, so that a rank that refuses its tensors may try again.
        if runner is not None and bucket is not None:
            given, variables = validate_tensors(given, names, backend)
            _check_same(bucket, variables)
            if runner.under_way(bucket):
                raise ConfigError(f"{bucket.ends!r} is under way already: call receive_step() before it is sent again")
        self._compare_names(names, backend)
        if runner is None or bucket is None:
            runner, bucket, given = self._add_names(given, names, backend)
        begun = PendingStep(bucket, [variable.dtype for variable in bucket.variables], single)
        runner.start_round_trip(bucket, given, [True] * len(given))
        self.begun.append(begun)
        return begun

    def receive(self, begun: PendingStep) -> Tensors:
        """End the step for all exchanges under way, unless it has ended, and return the means of one of them."""
        if begun.means is None:
            if self.runner is None or begun not in self.begun:
                raise ConfigError("receive_step() takes what send_step() of the same run returned, once for each")
            together, self.begun = self.begun, []
            # The traffic of a step is that of its tensors: programs may exchange one after the other.
            exchanged = [variable for other in together for variable in other.bucket.variables]
            self.runner.numel = sum(variable.numel for variable in exchanged)
            self.runner.nbytes = sum(variable.nbytes for variable in exchanged)
            try:
                outcomes = self.runner.finish_step(lambda bucket: [None] * len(bucket.variables))
            except BaseException:
                self.runner.abort()
                raise
            remaining = iter(outcomes)
            for other in together:
                other.means = [next(remaining).value for _ in other.bucket.variables]
        means, begun.means = begun.means or [], None
        means = [kernels_of(mean).cast(mean, dtype) for mean, dtype in zip(means, begun.dtypes, strict=True)]
        return means[0] if begun.single else means

    # -- the run ---------------------------------------------------------------------------------------

    def _compare_names(self, names: tuple[str, ...], backend: Backend) -> None:
        """Refuse a communicator, or names of tensors, that differ from those of other ranks in this exchange.

        An engine that pairs collectives by their order would average one tensor with another, or end all ranks if their
        sizes differ; and ranks that exchange by different communicators, which have channels of their own, would wait
        for ever. So a small all-gather of a digest, whose size never differs, precedes each exchange, and the agreement
        on new names.

        Raises:
            RankError: (on all ranks) they differ; no tensor was exchanged.
        """
        # Pairing by name cannot average one tensor with another.
        if backend.size == 1 or backend.pairs_by_name:
            return
        listed = ", ".join(map(repr, names))
        # Joined communicators have numbers; the agreement compares new ones.
        number, step = (0, 0) if self.runner is None else (self.number, self.runner.context.step)
        place = f"{listed} in step {step} of {'a new communicator' if number == 0 else f'communicator {number}'}"
        place = f"{place} ({self.communicator.describe()})"
        digest = np.frombuffer(hashlib.blake2b(f"{number} {listed}".encode(), digest_size=16).digest(), np.uint8)
        before = backend.sent_bytes
        with backend.waiting_for_ranks(lambda: f"the exchange by hand of {place}"):
            parts = backend.allgather(backend.tensor_of(digest.copy())).wait()
            digests = {np.asarray(part.cpu() if hasattr(part, "cpu") else part).tobytes() for part in parts}
            received = backend.allgather_pickled((number, listed, place)) if len(digests) > 1 else []
        backend.sent_bytes = before  # comparisons are not counted as traffic
        for rank, (*theirs, where) in enumerate(received):
            if theirs != list(received[0][:2]):
                raise RankError(
                    f"ranks exchange different tensors by hand: rank 0 {received[0][2]}, and rank {rank} {where}. "
                    "Every rank must exchange the same names, by the same communicators, in the same order, and as "
                    "often; nothing was exchanged"
                )

    def _add_names(
        self, given: list[Tensor], names: tuple[str, ...], backend: Backend
    ) -> tuple[StepRunner, Bucket, list[Tensor]]:
        """Agree with the other ranks on a bucket of new names, and make it.

        Returns:
            the runner, the bucket, and the tensors in the form that the runner takes.
        """
        tensors: list[Tensor] = []

        # Checked inside the agreement, so that the other ranks get this rank's error.
        def variables_of() -> list[Variable]:
            found, variables = validate_tensors(given, names, backend)
            tensors.extend(found)
            return variables

        if self.runner is None:
            self.runner, bucket = self._join_run(variables_of, backend)
        else:
            bucket = self._add_bucket(self.runner, variables_of)
        self.buckets[names] = bucket
        return self.runner, bucket, tensors

    def _join_run(self, variables: Callable[[], list[Variable]], backend: Backend) -> tuple[StepRunner, Bucket]:
        """Build the runner for a run that the communicator joins, and its first bucket."""
        communicator = self.communicator

        def check(communicator: Communicator) -> None:
            if communicator.delayed:
                raise ConfigError(
                    f"{communicator.describe()} applies means in later steps, which only an optimizer can: use "
                    "grace.DistributedOptimizer, or leave that out"
                )
            # The context still has its default, which nobody replaced.
            unknown = communicator.lr is None and usual is Context.lr and backend.size > 1
            if communicator.memory.needs_lr and unknown:
                raise ConfigError(
                    f"the memory {communicator.memory.spec} follows the learning rate, which a communicator that is "
                    "listed by hand does not know: set its attribute lr before each step"
                )

        context = communicator.context if self.first else Context(seed=communicator.context.seed)
        usual = context.lr
        self.first = False
        context.api_names = BY_HAND

        def lr(name: str) -> float:
            return usual(name) if communicator.lr is None else communicator.lr

        context.lr = lr
        plan = WholeTensorPlan(None, None, communicator)
        self.number = next(_run_numbers)
        runner = build_step_runner(variables, lambda: plan, backend, context, [("listed", "by hand")], check)
        (bucket,) = runner.buckets
        self._label(bucket)
        backend.at_shutdown(WeakCall(self.leave_run))  # the backend must not keep the communicator alive
        return runner, bucket

    def _add_bucket(self, runner: StepRunner, variables: Callable[[], list[Variable]]) -> Bucket:
        """Agree with the other ranks on a further bucket, and add it to the runner."""
        found, error = [], None
        try:
            found = variables()
            for variable in found:
                if variable.name in runner.shards:
                    raise ConfigError(
                        f"{variable.name!r} was exchanged with other tensors before: join the same ones in every step"
                    )
        except Exception as raised:
            error = raised
        step = ("the number of steps", str(runner.context.step))
        compare_facts(runner.backend, [step, *((f"the tensor {v.name!r}", v.describe()) for v in found)], error)
        bucket = _append_bucket(runner, WholeTensorPlan(None, None, self.communicator).shards(found))
        self._label(bucket)
        return bucket

    def _label(self, bucket: Bucket) -> None:
        bucket.label = f"grace.hand{self.number}.{bucket.index}"

    def leave_run(self) -> None:
        """Leave the run, and drop the runner and its state."""
        runner, self.runner, self.buckets, self.begun = self.runner, None, {}, []
        if runner is not None:
            if runner.in_progress:
                runner.abort()
            runner.close()

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self, everyone: bool = False) -> SavedState:
        """Return the saved state; see :meth:`grace.Communicator.state_dict`."""
        if self.runner is None:
            raise ConfigError("nothing was exchanged yet, so that there is nothing to save")
        saved = checkpoint.gather(self.runner) if everyone else checkpoint.save(self.runner)
        groups = [[[v.name, list(v.shape), v.dtype] for v in bucket.variables] for bucket in self.buckets.values()]
        return {"of": FORM, "tensors": groups, "grace": saved}

    def load_state_dict(self, state: SavedState, memory: str = "strict") -> None:
        """Restore a saved state; see :meth:`grace.Communicator.load_state_dict`."""
        backend, groups, error = runtime.joined(), list[list[Variable]](), None
        if self.runner is not None and self.runner.backend is not backend:
            self.leave_run()
        try:
            groups = _groups(state)
            for group in groups:
                bucket = self.buckets.get(tuple(v.name for v in group))
                if bucket is not None:
                    _check_same(bucket, group)
            checkpoint.without_damaged(state["grace"], memory, BY_HAND)
            _check_pieces(state["grace"], groups)
        except Exception as raised:
            error = raised
        tensors = [f"{v.name!r} {v.describe()}" for group in groups for v in group]
        compare_facts(backend, [("the tensors of a state", ", ".join(tensors))], error)
        before, first = set(self.buckets), self.first
        try:
            for group in groups:
                names = tuple(variable.name for variable in group)
                if self.runner is None:
                    self.runner, self.buckets[names] = self._join_run(partial(list, group), backend)
                elif names not in self.buckets:
                    self.buckets[names] = self._add_bucket(self.runner, partial(list, group))
            assert self.runner is not None
            checkpoint.load(self.runner, lambda: state["grace"], memory)
        # raised on all ranks, before any state was changed: take back the buckets that were added
        except BaseException:
            if not before:
                self.leave_run()
                self.first = first
            elif self.runner is not None:
                self.buckets = {names: bucket for names, bucket in self.buckets.items() if names in before}
                _remove_variables(self.runner, {name for names in before for name in names})
            raise


def _groups(state: object) -> list[list[Variable]]:
    """Return the variables of a saved state, in groups that were exchanged together.

    Raises:
        ConfigError: it is no state of a communicator that is listed by hand, or it is damaged.
    """
    if not isinstance(state, dict) or state.get("of") != FORM:
        raise ConfigError(
            "not the state of a communicator that is listed by hand: pass the dict that its state_dict() returned"
        )
    try:
        state_schema.TENSORS(state.get("tensors"), "'tensors'")
    except ConfigError:
        given = []
    else:
        given = state["tensors"]
    groups = [[Variable(name, tuple(shape), dtype) for name, shape, dtype in group] for group in given]
    names = [variable.name for group in groups for variable in group]
    if not names or not all(groups) or len(set(names)) < len(names) or "grace" not in state:
        raise ConfigError("the state of the communicator is damaged: it does not say of which tensors it is")
    return groups


def _check_pieces(saved: SavedState, groups: list[list[Variable]]) -> None:
    """Refuse a state whose list of tensors differs from its sealed part, which has a checksum."""
    pieces, given = saved.get("pieces"), {v.name: list(v.shape) for group in groups for v in group}
    if pieces is not None and {name: list(cut.get("shape", given.get(name))) for name, cut in pieces.items()} != given:
        raise ConfigError("the state of the communicator is damaged: its tensors are not those that it remembers")


def _check_same(bucket: Bucket, variables: Sequence[Variable]) -> None:
    """Refuse tensors whose type or shape changed since their first step. The device may change."""
    for before, now in zip(bucket.variables, variables, strict=True):
        if before.describe() != now.describe():
            raise ConfigError(
                f"tensor {now.name!r} is {now.describe()} now, and was {before.describe()} at its first step. Give "
                "each tensor a name of its own"
            )


def _append_bucket(runner: StepRunner, shards: Sequence[Shard]) -> Bucket:
    """Add a bucket to a runner, and return it. Every rank must add the same bucket between the same steps."""
    for shard in shards:
        runner.variables.append(shard.variable)
        runner.shards[shard.variable.name] = shard
        runner.shards_of[shard.variable.name] = [shard]
    bucket = Bucket(len(runner.buckets), shards[0].communicator, [shard.variable for shard in shards])
    runner.buckets.append(bucket)
    return bucket


def _remove_variables(runner: StepRunner, names: set[str]) -> None:
    """Remove all variables that :func:`_append_bucket` added, except those with these names."""
    runner.variables = [variable for variable in runner.variables if variable.name in names]
    runner.shards = {name: shard for name, shard in runner.shards.items() if name in names}
    runner.shards_of = {name: shards for name, shards in runner.shards_of.items() if name in names}
    runner.buckets = [bucket for bucket in runner.buckets if names.issuperset(bucket.names)]


def validate_tensors(
    given: list[Tensor], names: tuple[str, ...], backend: Backend
) -> tuple[list[Tensor], list[Variable]]:
    """Return a user's tensors in the form that an exchange takes, and their variables, which ranks compare.

    Raises:
        ConfigError: the names or tensors are wrong, or the tensors cannot share a bucket.
    """
    if len(given) != len(names) or not names:
        raise ConfigError(f"there are {len(given)} tensors and {len(names)} names; give one name for each")
    strange = next((name for name in names if not isinstance(name, str)), None)
    if strange is not None or len(set(names)) < len(names):
        raise ConfigError(f"names must be strings that differ from each other; they are {', '.join(map(repr, names))}")
    tensors, variables = [], []
    for tensor, name in zip(given, names, strict=True):
        with _named_errors(name):
            k = kernels_of(tensor)
            tensors.append(k.given(tensor))
            device = str(getattr(tensor, "device", ""))
            variables.append(Variable(name, tuple(tensor.shape), k.dtype(tensors[-1]), device=device))
            if not k.name.startswith(backend.framework):  # a backend of any framework has ""
                raise ConfigError(f"it is of {k.name}, and {backend.describe()} moves tensors of {backend.framework}")
    first = variables[0]
    for other in variables:
        if (other.dtype, other.device) != (first.dtype, first.device):
            raise ConfigError(
                f"{first.name!r} is {first.dtype} on {first.device or 'the host'}, {other.name!r} is {other.dtype} on "
                f"{other.device or 'the host'}: tensors that travel together must be alike"
            )
    return tensors, variables


@contextlib.contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Add the tensor's name to errors that are raised in this context."""
    try:
        yield
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"cannot exchange {name!r}: {error}") from None
