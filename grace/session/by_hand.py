"""A communicator that the user calls by hand, GRACE's way: its steps, outside of any optimizer."""

import contextlib
import hashlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grace.backends import runtime
from grace.core.api_names import BY_HAND
from grace.core.backend import Backend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.core.variable import Variable
from grace.errors import ConfigError, RankError
from grace.exchange.bucket import Bucket
from grace.kernels import kernels_of
from grace.session import checkpoint, state_schema
from grace.session.agreement import agree
from grace.session.plan import UniformPlan
from grace.session.setup import build_step_runner
from grace.session.sharding import Shard
from grace.session.step_runner import StepRunner

_joined = itertools.count(1)
"""Counts communicators that join a run, which they do in one order on all ranks."""
FORM = "tensors, step by step"
"""What a saved state says that it is of."""


class AsGiven(UniformPlan):
    """The plan of tensors that are exchanged as they come: whole, and all by the one communicator, however small."""

    def shards(self, variables: Sequence[Variable], ranks: int = 1) -> list[Shard]:
        communicator = self._made()
        self.name = communicator.describe()
        return [Shard(variable, variable, communicator) for variable in variables]


class Begun:
    """An exchange that :meth:`grace.Communicator.send_step` began."""

    def __init__(self, bucket: Bucket, dtypes: list[str], single: bool):
        self.bucket, self.dtypes, self.single = bucket, dtypes, single
        self.means: list[Any] | None = None


class ByHand:
    """The steps of one communicator. It joins the run at its first step, and leaves it at ``grace.shutdown()``.

    Tensors that are exchanged together are one bucket. The first time that some names come together, the ranks compare
    them, so that they must come in the same order on all ranks.

    Args:
        communicator: whose.
    """

    def __init__(self, communicator: Communicator):
        self._communicator = weakref.ref(communicator)
        self.runner: StepRunner | None = None
        self.buckets: dict[tuple[str, ...], Bucket] = {}
        self.begun: list[Begun] = []
        self.first = True
        """Whether it was in no run yet: then the context that it has may say seed, step and learning rate."""
        self.number = 0
        """Of this communicator in the run: several exchanges are under way at once, and some engines go by names."""

    @property
    def communicator(self) -> Communicator:
        """Whose steps these are; it holds this object."""
        communicator = self._communicator()
        assert communicator is not None
        return communicator

    # -- steps -----------------------------------------------------------------------------------------

    def step(self, tensors: Any, names: Any) -> Any:
        """See :meth:`grace.Communicator.step`."""
        given = [tensors] if isinstance(names, str) else list(tensors)
        try:
            run = kernels_of(given[0]).eagerly
        except (TypeError, IndexError):  # what is wrong the other ranks are told too, if they are to agree
            return self._whole_step(given, names)
        means = run(lambda eager: self._whole_step(eager, names), given)
        return means[0] if isinstance(names, str) else means

    def _whole_step(self, tensors: list[Tensor], names: Any) -> list[Tensor]:
        means = self.finish(self.start(tensors[0] if isinstance(names, str) else tensors, names))
        return [means] if isinstance(names, str) else list(means)

    def start(self, tensors: Any, names: Any) -> Begun:
        """Begin to exchange tensors; see :meth:`grace.Communicator.send_step`."""
        single = isinstance(names, str)
        given, called = ([tensors], (names,)) if single else (list(tensors), tuple(names))
        backend = runtime.joined()
        if self.runner is not None and self.runner.backend is not backend:
            self.free()  # of a run that has ended, or that began since
        runner, bucket = self.runner, self.buckets.get(called)
        if runner is not None and bucket is not None:  # a rank refuses what it is given alone, and may try again
            given, variables = described(given, called, backend)
            _check_same(bucket, variables)
            if runner.under_way(bucket):
                raise ConfigError(f"{bucket.ends!r} is under way already: call receive_step() before it is sent again")
        _compare(backend, called, 0 if runner is None else runner.context.step)
        if runner is None or bucket is None:
            runner, bucket, given = self._new(given, called, backend)
        begun = Begun(bucket, [variable.dtype for variable in bucket.variables], single)
        runner.start(bucket, given, [True] * len(given))
        self.begun.append(begun)
        return begun

    def finish(self, begun: Begun) -> Any:
        """The means of what was begun; they end the step for all that is under way."""
        if begun.means is None:
            if self.runner is None or begun not in self.begun:
                raise ConfigError("receive_step() is given what send_step() returned, once, in the same run")
            together, self.begun = self.begun, []
            try:
                outcomes = self.runner.finish(lambda bucket: [None] * len(bucket.variables))
            except BaseException:
                self.runner.abandon()
                raise
            left = iter(outcomes)
            for other in together:
                other.means = [next(left).value for _ in other.bucket.variables]
        means, begun.means = begun.means or [], None
        means = [kernels_of(mean).cast(mean, dtype) for mean, dtype in zip(means, begun.dtypes, strict=True)]
        return means[0] if begun.single else means

    # -- the run ---------------------------------------------------------------------------------------

    def _new(
        self, given: list[Any], names: tuple[str, ...], backend: Backend
    ) -> tuple[StepRunner, Bucket, list[Tensor]]:
        """The runner, a bucket of names that are new, which the ranks agree on, and the tensors as it takes them."""
        tensors: list[Tensor] = []

        def variables_of() -> list[Variable]:
            found, variables = described(given, names, backend)
            tensors.extend(found)
            return variables

        if self.runner is None:
            self.runner, bucket = self._joined(variables_of, backend)
        else:
            bucket = self._added(self.runner, variables_of)
        self.buckets[names] = bucket
        return self.runner, bucket, tensors

    def _joined(self, variables: Any, backend: Backend) -> tuple[StepRunner, Bucket]:
        """The first step in a run."""
        communicator = self.communicator

        def check(communicator: Communicator) -> None:
            if communicator.delayed:
                raise ConfigError(
                    f"{communicator.describe()} applies means in later steps, which only an optimizer can: use "
                    "grace.DistributedOptimizer, or leave that out"
                )
            unknown = communicator.lr is None and usual is Context.lr and backend.size > 1
            if communicator.memory.needs_lr and unknown:
                raise ConfigError(
                    f"the memory {communicator.memory.spec} follows the learning rate, which a communicator that is "
                    "called by hand does not know: set its attribute lr before each step"
                )

        context = communicator.context if self.first else Context(seed=communicator.context.seed)
        usual, self.first, context.api_names = context.lr, False, BY_HAND

        def lr(name: str) -> float:
            return usual(name) if communicator.lr is None else communicator.lr

        context.lr = lr
        plan, self.number = AsGiven(None, None, communicator), next(_joined)
        runner = build_step_runner(variables, lambda: plan, backend, context, [("called", "by hand")], check)
        (bucket,) = runner.buckets
        self._name(bucket)
        free = weakref.WeakMethod(self.free)
        backend.at_shutdown(lambda: (free() or bool)())
        return runner, bucket

    def _added(self, runner: StepRunner, variables: Any) -> Bucket:
        """One more bucket."""
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
        agree(runner.backend, [step, *((f"the tensor {v.name!r}", v.describe()) for v in found)], error)
        bucket = _extend(runner, AsGiven(None, None, self.communicator).shards(found))
        self._name(bucket)
        return bucket

    def _name(self, bucket: Bucket) -> None:
        bucket.label = f"grace.hand{self.number}.{bucket.index}"

    def free(self) -> None:
        """Leave the run: nothing is remembered of it."""
        runner, self.runner, self.buckets, self.begun = self.runner, None, {}, []
        if runner is not None:
            if runner.begun:
                runner.abandon()
            runner.close()

    # -- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self, everyone: bool = False) -> dict[str, Any]:
        """See :meth:`grace.Communicator.state_dict`."""
        if self.runner is None:
            raise ConfigError("nothing was exchanged yet, so that there is nothing to save")
        saved = checkpoint.gather(self.runner) if everyone else checkpoint.save(self.runner)
        groups = [[[v.name, list(v.shape), v.dtype] for v in bucket.variables] for bucket in self.buckets.values()]
        return {"of": FORM, "tensors": groups, "grace": saved}

    def load_state_dict(self, state: dict[str, Any], memory: str = "strict") -> None:
        """See :meth:`grace.Communicator.load_state_dict`."""
        backend, groups, error = runtime.joined(), list[list[Variable]](), None
        if self.runner is not None and self.runner.backend is not backend:
            self.free()
        try:
            groups = _groups(state)
            for group in groups:
                if (bucket := self.buckets.get(tuple(v.name for v in group))) is not None:
                    _check_same(bucket, group)
            checkpoint.undamaged(state["grace"], memory, BY_HAND)
            _check_pieces(state["grace"], groups)
        except Exception as raised:
            error = raised
        told = [f"{v.name!r} {v.describe()}" for group in groups for v in group]
        agree(backend, [("the tensors of a state", ", ".join(told))], error)
        before, first = set(self.buckets), self.first
        try:
            for group in groups:
                names = tuple(variable.name for variable in group)
                if self.runner is None:
                    self.runner, self.buckets[names] = self._joined(lambda group=group: group, backend)
                elif names not in self.buckets:
                    self.buckets[names] = self._added(self.runner, lambda group=group: group)
            assert self.runner is not None
            checkpoint.load(self.runner, lambda: state["grace"], memory)
        except BaseException:  # of all ranks: nothing was changed
            if not before:
                self.free()
                self.first = first
            elif self.runner is not None:
                self.buckets = {names: bucket for names, bucket in self.buckets.items() if names in before}
                _shrink(self.runner, {name for names in before for name in names})
            raise


def _compare(backend: Backend, names: tuple[Any, ...], step: int) -> None:
    """Refuse to exchange what other ranks do not exchange now.

    An engine that pairs collectives by their order would average one tensor with another, or end all ranks where their
    sizes differ. One small all-gather, whose size never differs, comes first, before new names are agreed on too.

    Raises:
        RankError: (on all ranks) tensors of other names come; nothing was exchanged.
    """
    if backend.size == 1 or backend.pairs_by_name:
        return
    called = ", ".join(map(repr, names))
    place = f"{called} in step {step}"
    digest = np.frombuffer(hashlib.blake2b(called.encode(), digest_size=16).digest(), np.uint8)
    before = backend.sent_bytes
    with backend.waiting_for_ranks(lambda: f"the exchange by hand of {place}"):
        parts = backend.allgather(backend.tensor_of(digest.copy())).wait()
        digests = {np.asarray(part.cpu() if hasattr(part, "cpu") else part).tobytes() for part in parts}
        told = backend.allgather_pickled((called, place)) if len(digests) > 1 else []
    backend.sent_bytes = before
    for rank, (theirs, where) in enumerate(told):
        if theirs != told[0][0]:
            raise RankError(
                f"ranks exchange different tensors by hand: rank 0 {told[0][1]}, and rank {rank} {where}. Every "
                "rank must exchange the same names, in the same order, and as often; nothing was exchanged"
            )


def _groups(state: Any) -> list[list[Variable]]:
    """The tensors that a state is of, as they were exchanged together."""
    if not isinstance(state, dict) or state.get("of") != FORM:
        raise ConfigError(
            "this is no state of a communicator that is called by hand: give what its state_dict() returned"
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


def _check_pieces(saved: dict[str, Any], groups: list[list[Variable]]) -> None:
    """Refuse tensors that are not those of the state itself, which is sealed."""
    pieces, given = saved.get("pieces"), {v.name: list(v.shape) for group in groups for v in group}
    if pieces is not None and {name: list(cut.get("shape", given.get(name))) for name, cut in pieces.items()} != given:
        raise ConfigError("the state of the communicator is damaged: its tensors are not those that it remembers")


def _check_same(bucket: Bucket, variables: Sequence[Variable]) -> None:
    """Refuse other tensors than the names stood for before; they may lie on another device."""
    for before, now in zip(bucket.variables, variables, strict=True):
        if before.describe() != now.describe():
            raise ConfigError(
                f"{now.name!r} is {now.describe()} now, and was {before.describe()} at its first step. Give another "
                "name to what is another tensor"
            )


def _extend(runner: StepRunner, shards: Sequence[Shard]) -> Bucket:
    """One more bucket of a runner's; every rank must add the same at the same moment."""
    for shard in shards:
        runner.variables.append(shard.variable)
        runner.shards[shard.variable.name] = shard
        runner.shards_of[shard.variable.name] = [shard]
        runner.numel += shard.variable.numel
    bucket = Bucket(len(runner.buckets), shards[0].communicator, [shard.variable for shard in shards])
    runner.buckets.append(bucket)
    return bucket


def _shrink(runner: StepRunner, names: set[str]) -> None:
    """Take away what :func:`_extend` added, but for these names."""
    runner.variables = [variable for variable in runner.variables if variable.name in names]
    runner.shards = {name: shard for name, shard in runner.shards.items() if name in names}
    runner.shards_of = {name: shards for name, shards in runner.shards_of.items() if name in names}
    runner.buckets = [bucket for bucket in runner.buckets if names.issuperset(bucket.names)]
    runner.numel = sum(variable.numel for variable in runner.variables)


def described(given: list[Any], names: tuple[str, ...], backend: Backend) -> tuple[list[Tensor], list[Variable]]:
    """A user's tensors as an exchange takes them, and what the ranks compare of them.

    Raises:
        ConfigError: they are no tensors that could travel together.
    """
    if len(given) != len(names) or not names:
        raise ConfigError(f"there are {len(given)} tensors and {len(names)} names; give one name for each")
    strange = next((name for name in names if not isinstance(name, str)), None)
    if strange is not None or len(set(names)) < len(names):
        raise ConfigError(f"names must be strings, each another; they are {', '.join(map(repr, names))}")
    tensors, variables = [], []
    for tensor, name in zip(given, names, strict=True):
        with _about(name):
            k = kernels_of(tensor)
            tensors.append(k.given(tensor))
            device = str(getattr(tensor, "device", ""))
            variables.append(Variable(name, tuple(tensor.shape), k.dtype(tensors[-1]), device=device))
            if not k.name.startswith(backend.framework):
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
def _about(name: Any) -> Iterator[None]:
    try:
        yield
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"cannot exchange {name!r}: {error}") from None


Communicator.by_hand_factory = ByHand
