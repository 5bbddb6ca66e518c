"""``strategy="auto"`` while a run trains: what is measured at which step, what is tried, and what is kept.

All ranks count the same steps, so that each comes to every collective of this module between the same two steps:

1. a few steps to warm up;
2. a few whose exchanges begin after backward: when each gradient is there, computing alone, on every rank;
3. a few plain ones, uncompressed, as a baseline;
4. the links, and the codecs of all methods on this model's gradients; rank 0 plans;
5. the best candidates and the baseline in turns, and those that are not far behind in further rounds: the fastest is
   kept, if it is faster than the baseline by a margin and by more than what its turns differ.

It is then watched: a link that becomes slower is told, and with ``replan`` planned for at once; else it begins anew at
2 ``replan`` steps later. Whatever fails while planning is one line, and training goes on uncompressed on all ranks.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from grace.core.backend import Backend, Tensor
from grace.errors import ConfigError, ExchangeError, said_of
from grace.planner import auto_planner
from grace.planner.codecs import is_table
from grace.planner.explain import MARGIN, Plan
from grace.planner.step_simulation import Timeline
from grace.planner.step_timer import StepTimer, undisturbed
from grace.session.agreement import gather_or_raise
from grace.session.step_runner import StepRunner
from grace.strategy.choices import AutoRequest
from grace.strategy.plan import Strategy

BASELINE = "none"
"""Name of the candidate that exchanges everything uncompressed."""
WARM, HELD, PLAIN = 2, 5, 5
"""Steps of each phase before planning."""
SETTLED, TIMED = 1, 3
"""Steps after a switch that do not count, and steps that do."""
TRIED, FINALISTS = 4, 2
"""Candidates that are tried, beside the baseline; and that have further turns."""
TRIALS, BEHIND = 48, 0.5
"""Steps of all turns, at most; and the part of the fastest one's step by which another's may be longer in a round."""
WATCH_SECONDS, WATCH_FIRST, WATCH_USUAL = 0.25, 5, 3
"""About how much training lies between two looks at a settled run; the steps until the first one; and the looks whose
least wait is the usual one."""
SLOWER, FELT = 2.0, 0.2
"""The factor by which a wait must have grown, in two looks, and the part of a step that this must take."""
T = TypeVar("T")


class PlanningError(Exception):
    """Error of planning, known to all ranks. Training goes on uncompressed."""


def _saved_strategy(resumed: "Resumed") -> Strategy:
    from grace.strategy import schema  # it needs pydantic, which builders do not

    return schema.parse(resumed.strategy)


class Resumed(NamedTuple):
    """State of planning in a checkpoint: name and document of the run's strategy; the plan, None before there is one;
    True if it was chosen; steps until all is measured again, 0 for never; the numbers of ranks and nodes; and the usual
    wait and step of the settled run, in seconds, None before its first look."""

    current: str
    strategy: dict[str, object]
    plan: dict[str, object] | None
    settled: bool
    left: int
    cluster: list[int]
    usual: Sequence[float] | None = None


class Driver:
    """Follows the steps of one model's training, and switches strategies.

    Args:
        planner, backend: what measures, finds candidates and explains; and over which the ranks agree.
        start: the strategy that the run begins with: everything summed uncompressed.
        switch, say: go on by a strategy, which every rank calls; and print a line, on rank 0.
        replan: after how many steps all is measured again; 0 for never.

    Attributes:
        steps_left: steps until ``phases`` go on; 0 for never.
        after_backward: True if exchanges are to begin after backward only.
        trying: True from the first trial on, until all is measured again.
        settled: True if a choice was made, and checked.
        current: name of the strategy that the run goes on by; empty once the user chose.
        plan: document of the choice and its reasons, the same on all ranks; None before.
    """

    def __init__(
        self,
        planner: auto_planner.AutoPlanner,
        backend: Backend,
        start: Strategy,
        switch: Callable[[Strategy], None],
        say: Callable[[str], None],
        replan: int = 0,
    ):
        self.planner, self.backend, self.switch, self.print_line = planner, backend, switch, say
        self.replan = replan
        self.names = [variable.name for variable in start.variables]
        self.strategies = {BASELINE: start}
        """Strategies that may be tried, or that a checkpoint had, by name."""
        self.cluster = [start.world_size, start.nodes]
        self.gradients: dict[str, Tensor] = {}
        self.results: dict[str, float] = {}
        """Seconds of a step of each candidate on the slowest rank: the median of its turns."""
        self.current = BASELINE
        self.plan: dict[str, object] | None = None
        self.after_backward = self.trying = self.settled = False
        self.link_watch: LinkWatch | None = None
        """Watch over the links of a settled run of several ranks; None before, and for one rank."""
        self.usual: Sequence[float] | None = None
        """Usual wait and step of the settled run, in seconds; None before its first look."""
        self.phases = self._train_and_plan(WARM)
        """Parts of planning, one after the other; each yields the number of steps to train before it goes on."""
        self._advance()

    @property
    def explanation(self) -> Plan | None:
        """Explanation of the choice; None as long as there is none."""
        return None if self.plan is None else Plan.from_dict(self.plan)

    def _advance(self) -> None:
        """Go on with the phases, until they need steps of training."""
        self.steps_left, self.skip, self.timer = next(self.phases, 0), SETTLED, StepTimer()

    def ready(self, name: str) -> None:
        """Note that a variable's gradient is there."""
        self.timer.ready(name)

    def computed(self, gradients: Callable[[], Mapping[str, Tensor]]) -> None:
        """Note that backward is done, and exchanges are awaited; ``gradients`` copies this rank's own."""
        self.timer.mark("computed")
        if self.after_backward and self.steps_left == 1:
            self.gradients = dict(gradients())
            self.timer.marks["computed"] = 0.0  # a copy was made meanwhile: the step does not count

    def exchanged(self) -> None:
        """Note that gradients are means."""
        self.timer.mark("exchanged")

    def stepped(self) -> None:
        """Note that the optimizer has made its step; go on to the next phase when it is time."""
        if not self.steps_left and self.link_watch is None:  # nothing is measured, and nothing watched
            return
        self.timer.end(self.skip <= 0)
        self.skip -= 1
        if self.steps_left:
            self.steps_left -= 1
            if self.steps_left == 0:
                self._advance()
                self.timer.begin()
        if self.link_watch is not None:
            self._check_link(self.link_watch)

    def document(self) -> str:
        """Return what a checkpoint holds of planning; empty once the user chose."""
        if not self.current:
            return ""
        strategy, left = self.strategies[self.current].to_dict(), self.steps_left if self.settled else 0
        state = Resumed(self.current, strategy, self.plan, self.settled, left, self.cluster, self.usual)
        return json.dumps(state._asdict())

    def resumed_from(self, saved: Mapping[str, Any] | None) -> "Resumed | None":
        """Return the state to go on from, or None if the checkpoint has none. For one of another cluster, where other
        costs hold, that is to plan at once; until then its strategy keeps what memories hold. Raise ConfigError if the
        state is damaged."""
        if not saved or "plan" not in saved:
            return None
        try:
            resumed = Resumed(**json.loads(saved["plan"]))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the checkpoint's plan is damaged: {error!r}") from error
        if not self.is_elsewhere(resumed):
            return resumed
        ranks, nodes = self.cluster
        strategy = dataclasses.replace(_saved_strategy(resumed), world_size=ranks, nodes=nodes)
        return resumed._replace(strategy=strategy.to_dict(), plan=None, settled=False, usual=None)

    def is_elsewhere(self, resumed: "Resumed | None") -> bool:
        """Return True if a checkpoint's state is of another number of ranks or nodes, or if there is none."""
        return resumed is None or resumed.cluster != self.cluster

    def resume(self, resumed: "Resumed") -> None:
        """Go on as a checkpoint says, with the strategy that it had, which the session goes on by already."""
        self.current, self.plan, self.gradients = resumed.current, resumed.plan, {}
        former, start = _saved_strategy(resumed), self.strategies[BASELINE]
        self.strategies = {resumed.current: former, BASELINE: start}
        self.after_backward, self.settled = False, resumed.settled
        self.usual = resumed.usual  # a link may have become slower while nothing trained
        self.link_watch = LinkWatch(self.usual) if resumed.settled and self.backend.size > 1 else None
        steps = resumed.left if self.replan else 0
        self.phases = self._train_and_plan(steps if resumed.settled else 1)
        self._advance()

    def stop(self) -> None:
        """End planning, because the user chose another strategy: nothing of it is measured, tried, or saved."""
        self.plan, self.gradients, self.current, self.link_watch, self.usual = None, {}, "", None, None
        self.after_backward, self.settled = False, True
        self.phases.close()  # its generator waits for steps that will not come
        self._advance()

    def _train_and_plan(self, steps: int) -> Generator[int, None, None]:
        """Train so many steps, plan, and go on by the plan; again and again, since links and steps may change."""
        while True:
            yield steps
            self.link_watch, self.usual, self.trying, self.settled = None, None, False, False
            self._switch_to(BASELINE)
            try:
                yield from self._plan()
                self.link_watch = LinkWatch() if self.backend.size > 1 else None
            except PlanningError as error:
                self.gradients, self.after_backward = {}, False
                self._switch_to(BASELINE)
                self.print_line(f"grace: auto: planning failed, and training goes on uncompressed: {error}")
            self.settled = True
            steps = self.replan

    def _plan(self) -> Generator[int, None, None]:
        """Measure, try candidates, and go on by the best. Raise PlanningError if something failed on some rank."""
        self.after_backward = True
        yield HELD  # with exchanges after backward, which show when each gradient is ready
        self.after_backward = False
        timeline = self.timer.timeline(self.names)
        yield PLAIN  # with exchanges as in training: the baseline's step
        found = self._measure(timeline)
        self.strategies = {BASELINE: self.strategies[BASELINE], **found}
        self.results, self.trying = {}, True
        chosen = yield from self._race([BASELINE, *found])
        if not self._switch_to(chosen):  # what could be tried is refused now
            chosen = self.current
        self.plan, line = self._agree("a plan", lambda: self.planner.explained(chosen, self.results))
        self.print_line(f"grace: auto: {line}")

    def _measure(self, timeline: Timeline | None) -> dict[str, Strategy]:
        """Measure the links and the codecs, after the baseline's steps, and return the strategies to try, best first,
        by the names of the candidates. Raise PlanningError if a rank has seen no whole step."""
        plain = self.timer.seconds()
        seen = bool(plain and timeline and self.gradients)
        told = gather_or_raise(self.backend, "steps to plan by", (timeline, undisturbed(plain)) if seen else None)
        if None in told:
            raise PlanningError(
                f"rank {told.index(None)} has seen no whole step: one backward pass, then optimizer.step()"
            )
        # the slowest rank's computing decides: what the others wait for it is no time of the network
        slowest = max((line for line, _ in told), key=lambda line: line.compute)
        skew = slowest.compute - min(line.compute for line, _ in told)
        self.print_line("grace: auto: measuring links and methods, then planning; a few seconds")
        plain_step = max(seconds for _, seconds in told)
        self._agree("links", lambda: self.planner.measure_links(plain_step), everywhere=True)
        gradients, self.gradients = self.gradients, {}
        tables = self._agree("tables", lambda: {name for name, x in gradients.items() if is_table(x)})  # rank 0 decides
        self._agree("methods", lambda: self.planner.measure_methods(gradients, tables, slowest), everywhere=True)

        def candidates() -> dict[str, Strategy]:
            found = [one for one in self.planner.find_candidates(skew) if one.name != BASELINE]
            return {one.name: one.strategy for one in found[:TRIED]}

        return self._agree("what to try", candidates)

    def _race(self, names: Sequence[str]) -> Generator[int, None, str]:
        """Let candidates and the baseline take turns, round after round, as long as steps allow: all of them first, and
        then the fastest so far and what is not far behind. Return the name of the fastest in the end that beats the
        baseline, or the baseline's.

        Those that are compared take turns in the same rounds, so that what disturbs for a while disturbs all.
        """
        rounds, ahead, left = list[dict[str, float]](), list[str](), TRIALS
        while len(names) > 1 and len(names) * (SETTLED + TIMED) <= left:
            left -= len(names) * (SETTLED + TIMED)
            rounds.append((yield from self._take_turns(names)))
            for name in rounds[-1]:
                self.results[name] = statistics.median(took[name] for took in rounds if name in took)
            if BASELINE not in self.results:
                raise PlanningError("no uncompressed step was measured")
            near = (1 + BEHIND) * min(self.results.values())
            ahead = sorted((n for n in self.results if self.results[n] <= near), key=self.results.__getitem__)
            names = [name for name in ahead if name != BASELINE][:FINALISTS] + [BASELINE] * (BASELINE in ahead)
        return next((n for n in ahead if n in rounds[-1] and beats(rounds, n, BASELINE)), BASELINE)

    def _take_turns(self, names: Sequence[str]) -> Generator[int, None, dict[str, float]]:
        """Train some steps by each strategy in turn. Return the median seconds of a step on the slowest rank, of those
        that all ranks have timed."""
        took: dict[str, float] = {}
        for name in names:
            if not self._switch_to(name):  # it was refused, on all ranks
                continue
            yield SETTLED + TIMED
            if seconds := self.timer.seconds():
                took[name] = statistics.median(seconds)
        everyone = gather_or_raise(self.backend, "what trials took", took)
        return {name: max(one[name] for one in everyone) for name in names if all(name in one for one in everyone)}

    def _switch_to(self, name: str) -> bool:
        """Return True if all ranks go on by a candidate; else they go on by what they had before."""
        if name == self.current:
            return True
        try:
            self.switch(self.strategies[name])
        except ExchangeError:
            raise
        except Exception as error:
            self.print_line(f"grace: auto: {name} is left out: {error}")
            return False
        self.current = name
        return True

    def _agree(self, what: str, compute: Callable[[], T], everywhere: bool = False) -> T:
        """Return what rank 0 computes, or every rank. Raise PlanningError if that fails on one."""
        value, why = None, ""
        try:
            if everywhere or self.backend.rank == 0:
                value = compute()
        except ExchangeError:
            raise
        except Exception as error:
            why = said_of(error)
        answers = gather_or_raise(self.backend, what, (value, why))
        for rank, (_, reason) in enumerate(answers):
            if reason:
                raise PlanningError(f"rank {rank}: {reason}" if len(answers) > 1 else reason)
        return answers[0][0]  # rank 0's; where all compute, nothing is returned

    def _check_link(self, watch: "LinkWatch") -> None:
        """Compare waits with those when the choice was made; plan again, or tell once, if they have grown."""
        if not watch.check_is_due(self.timer):  # all ranks count the same steps, so all look at the same one
            return
        answers = gather_or_raise(self.backend, "waits", watch.median_times())
        # the least wait is that of the rank which comes last: it waits for no other, only for the network
        grown = watch.compare(min(wait for wait, _ in answers), max(step for _, step in answers))
        self.usual = watch.usual
        if not grown:
            return
        advice = "planning again" if self.replan else 'resume with strategy="auto(replan=...)", which plans again'
        self.print_line(f"grace: auto: {grown}: the link is slower, or shared; {advice}")
        self.link_watch = None
        if self.replan:
            self._advance()


def beats(rounds: Sequence[Mapping[str, float]], name: str, other: str) -> bool:
    """Return True if a candidate's turns were faster than another's of the same rounds: in the mean by the margin, and
    by more than this mean's standard error.

    >>> [beats([{"a": a, "b": 1.0} for a in turns], "a", "b") for turns in ([0.9, 0.92], [0.6, 1.2, 0.99], [0.99])]
    [True, False, False]
    """
    gains = [1 - took[name] / took[other] for took in rounds if name in took and other in took]
    error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return statistics.fmean(gains) >= max(MARGIN, error)


class LinkWatch:
    """Looks at a settled run every few steps: how long ranks wait for exchanges, and how long steps take.

    Args:
        usual: usual wait and step, in seconds; None to take them from the next looks.
    """

    def __init__(self, usual: Sequence[float] | None = None) -> None:
        self.steps = WATCH_FIRST
        """Steps until the next look."""
        self.timed: list[tuple[float, float]] = []
        self.usual = usual
        self.left_for_usual = WATCH_USUAL if usual is None else 0
        """Looks that may still lower the usual wait: what else a machine does makes waits longer only."""
        self.times = 0
        """Looks in a row that found longer waits."""

    def check_is_due(self, timer: StepTimer) -> bool:
        """Take the last step's times; return True if it is time to look."""
        self.timed += timer.taken_waits()
        self.steps -= 1
        return self.steps <= 0

    def median_times(self) -> tuple[float, float]:
        """Return the medians of waits and steps since the last look."""
        if not self.timed:
            return 0.0, 0.0
        waits, steps = zip(*self.timed, strict=True)
        return statistics.median(waits), statistics.median(steps)

    def compare(self, wait: float, step: float) -> str:
        """Take the ranks' wait and step; return what has grown, in words, if it has; the same on all ranks."""
        self.timed, self.steps = [], min(1000, max(2, round(WATCH_SECONDS / max(step, 1e-6))))
        if step <= 0:  # no step since the last look had one exchange
            return ""
        if self.left_for_usual:
            self.left_for_usual -= 1
            self.usual = min(tuple(self.usual or (wait, step)), (wait, step))
        assert self.usual is not None  # given, or known since the first look
        before, whole = self.usual
        longer = wait > SLOWER * before and wait - before > FELT * whole
        self.times = self.times + 1 if longer else 0
        if self.times < 2:  # one look may fall on a passing disturbance
            return ""
        return f"steps wait {wait * 1e3:.3g} ms for exchanges, and {before * 1e3:.3g} when this was chosen"


def build_driver(
    request: AutoRequest, runner: StepRunner, start: Strategy, switch: Callable[[Strategy], None], adaptive: bool
) -> Driver:
    """Return the driver that plans for the session of this first step runner and strategy, and have the session's
    checkpoints hold its state. ``switch`` goes on by another strategy, and must not keep the session alive."""
    backend = runner.backend

    def print_line(line: str) -> None:
        if backend.rank == 0:
            print(line, file=sys.stderr, flush=True)

    planner = auto_planner.AutoPlanner(request, backend, runner.node_names, runner.variables, adaptive)
    driver = Driver(planner, backend, start, switch, print_line, request.options.replan)
    runner.callbacks.planned = driver.document
    return driver
