"""``strategy="auto"`` while a run trains: what is measured at which step, what is tried, and what is kept.

All ranks count the same steps, so that each comes to every collective of this module between the same two steps:

1. a few steps to warm up;
2. a few whose exchanges begin after backward: when each gradient is there, computing alone, on every rank;
3. a few plain ones, uncompressed, as a baseline;
4. the links, and the codecs of the most promising methods on this model's gradients; rank 0 plans;
5. the best candidates and the baseline in turns; meanwhile the other methods are measured, a few between two turns;
6. rank 0 plans again, with all methods; the best of these and of those before in turns with the baseline;
7. the fastest once more in turns with the baseline: if it is not faster, the next best is checked so.

It is then watched: a link that becomes slower is told, and with ``replan`` planned for at once; else it begins anew at
2 ``replan`` steps later. Whatever fails while planning is one line, and training goes on uncompressed on all ranks.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grace.core.backend import Backend
from grace.errors import ConfigError, ExchangeError, GraceError
from grace.planner.step import Timeline
from grace.planner.step_timer import StepTimer, undisturbed
from grace.session.agreement import gather_or_raise
from grace.strategy.plan import Strategy

if TYPE_CHECKING:
    from grace.planner.planning import Planning

WARM, HELD, PLAIN = 2, 5, 5
"""Steps of each phase before planning."""
SETTLED, TIMED = 1, 3
"""Steps after a switch that do not count, and steps that do."""
TRIED = 3
"""Candidates in the first round of turns, beside the baseline; one more in the second."""
MARGIN = 0.03
"""The part of a step by which a candidate must be faster than the baseline."""
WATCH_SECONDS, WATCH_FIRST = 0.25, 5
"""About how much training lies between two looks at a settled run, and the steps until the first one."""
SLOWER, MUCH_SLOWER, FELT = 2.0, 4.0, 0.2
"""The factors by which a wait must have grown in two looks, or in one; and the part of a step that this must take."""


class Resumed(NamedTuple):
    """What a checkpoint says of planning.

    Attributes:
        current: the name of the strategy that the run had.
        strategy: its document.
        plan: what was chosen, and why; None before.
        settled: True if it was chosen, and not only tried.
        left: steps until all is measured again; 0 for never.
    """

    current: str
    strategy: dict[str, Any]
    plan: Any
    settled: bool
    left: int


class Driver:
    """Follows the steps of one model's training, and switches strategies.

    Args:
        planner: measures, finds candidates and explains.
        backend: over which the ranks agree.
        start: the strategy that the run begins with: everything summed uncompressed.
        switch: goes on by a strategy; every rank calls it.
        say: prints a line, on rank 0.
        replan: after how many steps all is measured again; 0 for never.
        baseline: the name of the candidate that exchanges everything uncompressed.
    """

    def __init__(
        self,
        planner: "Planning",
        backend: Backend,
        start: Strategy,
        switch: Callable[[Strategy], None],
        say: Callable[[str], None],
        replan: int = 0,
        baseline: str = "none",
    ):
        self.planner, self.backend, self.switch, self.say = planner, backend, switch, say
        self.replan, self.baseline = replan, baseline
        self.names = [variable.name for variable in start.variables]
        self.strategies = {baseline: start}
        """Those that were tried, by name."""
        self.resumed_strategy: dict[str, Any] = {}
        """The document of the strategy that a checkpoint had."""
        self.cluster = [start.world_size, start.nodes]
        self.timer = StepTimer()
        self.gradients: dict[str, Any] = {}
        self.timeline: Timeline | None = None
        self.turns: list[str] = []
        """Names of those that are to be tried, in order."""
        self.took: dict[str, list[float]] = {}
        """Seconds of the steps of each, on this rank, since the turns began."""
        self.results: dict[str, float] = {}
        """Seconds of a step of each on the slowest rank, of the last turns that it had."""
        self.ranking: list[str] = []
        """Names of candidates that were faster than the baseline by the margin, and not refused since; best first."""
        self.failed_checks: list[str] = []
        """Messages about candidates whose check failed."""
        self.problems = ""
        """Why further methods could not be measured, on rank 0."""
        self.current = baseline
        self.plan: Any = None
        """What was chosen, and why; a document, the same on all ranks. None before."""
        self.watch: Watch | None = None
        self.go(self._warm, WARM)

    def go(self, then: Callable[[], None], steps: int) -> None:
        """Do something when so many steps more are made."""
        self.then, self.left, self.skip = then, steps, SETTLED
        self.timer = StepTimer()

    # -- what a session tells -------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """True if exchanges are to begin after backward only."""
        return self.then == self._held

    @property
    def watching(self) -> bool:
        """True if anything of the next step is to be told."""
        return self.left > 0

    def ready(self, name: str) -> None:
        """Note that a variable's gradient is there."""
        self.timer.ready(name)

    def computed(self, gradients: Callable[[], Mapping[str, Any]]) -> None:
        """Note that backward is done, and exchanges are awaited.

        Args:
            gradients: copies of this rank's own.
        """
        self.timer.mark("computed")
        if self.holds and self.left == 1:
            self.gradients = dict(gradients())
            self.timer.now["computed"] = None  # a copy was made meanwhile

    def exchanged(self) -> None:
        """Note that gradients are means."""
        self.timer.mark("exchanged")

    def stepped(self) -> None:
        """Note that the optimizer has made its step; go on to the next phase when it is time."""
        if not self.left and self.watch is None:
            return
        self.timer.end(self.skip <= 0)
        self.skip -= 1
        if self.left:
            self.left -= 1
            if self.left == 0:
                self.then()
                self.timer.begin()
        if self.watch is not None:
            self._look()

    # -- checkpoints ----------------------------------------------------------------------------------

    def document(self) -> str:
        """Return what a checkpoint holds of planning; empty once the user chose."""
        if not self.current:
            return ""
        known = self.strategies.get(self.current)
        strategy = self.resumed_strategy if known is None else known.to_dict()
        about = {"current": self.current, "strategy": strategy, "plan": self.plan}
        left = self.left if self.then == self._again else 0
        return json.dumps({**about, "settled": self.settled, "left": left, "cluster": self.cluster})

    def found(self, saved: Mapping[str, Any] | None) -> "Resumed | None":
        """Return what a checkpoint says of planning; None if nothing, or for another cluster.

        Raises:
            ConfigError: it is damaged.
        """
        if not saved or "plan" not in saved:
            return None
        try:
            told = json.loads(saved["plan"])
            resumed = Resumed(**{name: told[name] for name in Resumed._fields})
            cluster = told["cluster"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"the checkpoint's plan is damaged: {error!r}") from error
        return resumed if cluster == self.cluster else None

    def resume(self, resumed: "Resumed") -> None:
        """Go on as a checkpoint says, with the strategy that it had, which the session goes on by already."""
        self.current, self.plan, self.gradients = resumed.current, resumed.plan, {}
        self.resumed_strategy = resumed.strategy
        self.strategies = {self.baseline: self.strategies[self.baseline]}
        if resumed.settled:
            self._settle()
            self.left = resumed.left
        else:
            self.watch = None
            self.go(self._again, 1)

    @property
    def settled(self) -> bool:
        """True if a choice was made, and checked."""
        return self.left == 0 or self.then == self._again

    def stop(self) -> None:
        """End planning, because the user chose another strategy: nothing of it is measured, tried, or saved."""
        self.go(self._settle, 0)
        self.plan, self.gradients, self.current, self.watch = None, {}, "", None

    # -- phases ---------------------------------------------------------------------------------------

    def _warm(self) -> None:
        self.go(self._held, HELD)

    def _held(self) -> None:
        self.timeline = self.timer.timeline(self.names)
        self.go(self._measured, PLAIN)

    def _measured(self) -> None:
        """Measure the links and the most promising codecs, plan, and begin to try."""
        timeline, plain = self.timeline, self.timer.seconds()
        seen = bool(plain and timeline and self.gradients)
        told = gather_or_raise(self.backend, "steps to plan by", (timeline, undisturbed(plain)) if seen else None)
        if None in told:
            self._give_up(f"rank {told.index(None)} has seen no whole step: one backward pass, then optimizer.step()")
            return
        # the slowest rank's computing decides: what the others wait for it is no time of the network
        slowest = max((line for line, _ in told), key=lambda line: line.compute)
        skew = slowest.compute - min(line.compute for line, _ in told)
        plain_step = max(seconds for _, seconds in told)
        self.say("grace: auto: measuring links and methods, then planning; a few seconds")
        if self._agreed("links", lambda: self.planner.measure_links(plain_step)) is None:
            return
        gradients, self.gradients = self.gradients, {}
        prepare = self._on_rank_0(lambda: self.planner.prepare(gradients, slowest, plain_step, skew))
        if self._agreed("methods", prepare) is None:
            return
        self.results, self.failed_checks, self.problems = {}, [], ""
        names = self._candidates(TRIED)
        if names is not None:
            self._take_turns([self.baseline, *names], self._refresh)

    def _candidates(self, most: int) -> list[str] | None:
        """Return the names of the best candidates beside the baseline; None if planning failed."""
        answers = self._agreed(
            "what to try",
            self._on_rank_0(lambda: [(one.name, one.strategy) for one in self.planner.candidates()]),
        )
        if answers is None:
            return None
        found = [(name, strategy) for name, strategy in answers[0] if name != self.baseline]
        for name, strategy in found:
            self.strategies[name] = strategy
        return [name for name, _ in found][:most]

    def _take_turns(self, names: Sequence[str], then: Callable[[], None]) -> None:
        """Train some steps by each, then go on."""
        self.turns, self.took, self.after_turns = list(names), {name: [] for name in names}, then
        self._next()

    def _next(self) -> None:
        """Begin the next candidate's turn, or end the turns."""
        while self.turns and not self._switched(self.turns[0]):
            self.turns = [name for name in self.turns if name != self.turns[0]]
        if self.turns:
            self.go(self._tried, SETTLED + TIMED)
        else:
            self.after_turns()

    def _switched(self, name: str) -> bool:
        """Return True if all ranks go on by a candidate; else they go on by what they had before."""
        if name == self.current:
            return True
        try:
            self.switch(self.strategies[name])
        except ExchangeError:
            raise
        except Exception as error:
            self.say(f"grace: auto: {name} is left out: {error}")
            return False
        self.current = name
        return True

    def _tried(self) -> None:
        self.took[self.turns.pop(0)] += self.timer.seconds()
        if self.after_turns == self._refresh and self.backend.rank == 0:
            self.problems = self.problems or self._failure(self.planner.measure_next)
        self._next()

    def _share_results(self) -> bool:
        """Let all ranks know the slowest rank's seconds of each that had turns; return False if planning ended."""
        medians = {name: statistics.median(seconds) for name, seconds in self.took.items() if seconds}
        everyone = gather_or_raise(self.backend, "what trials took", medians)
        shared = [name for name in everyone[0] if all(name in one for one in everyone)]
        self.results.update({name: max(one[name] for one in everyone) for name in shared})
        if self.baseline not in shared:
            self._give_up("no uncompressed step was measured")
            return False
        return True

    def _refresh(self) -> None:
        """Plan again, with the methods that were measured meanwhile, and try the best."""
        if not self._share_results():
            return
        if self._agreed("further methods", self._on_rank_0(self._measure_rest)) is None:
            return
        found = self._candidates(TRIED)
        if found is None:
            return
        known = sorted((name for name in self.results if name != self.baseline), key=self.results.__getitem__)
        names = dict.fromkeys([*known[:1], *found])
        self._take_turns([*list(names)[: TRIED + 1], self.baseline], self._choose)

    def _measure_rest(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)
        while self.planner.measure_next():
            pass

    def _choose(self) -> None:
        """Rank the candidates, and check the best."""
        if not self._share_results():
            return
        limit = (1 - MARGIN) * self.results[self.baseline]
        fast = [name for name, seconds in self.results.items() if seconds <= limit and name != self.baseline]
        self.ranking = sorted(fast, key=self.results.__getitem__)
        self._check_next()

    def _check_next(self) -> None:
        """Compare the best candidate that is left with the baseline once more, in turns; or settle uncompressed."""
        if self.ranking:
            best = self.ranking[0]
            self._take_turns([best, self.baseline, best], self._checked)
        else:
            self._decide(self.baseline)

    def _checked(self) -> None:
        """Keep the candidate if it is faster than the baseline of the same minutes; else check the next best."""
        best, before = self.ranking[0], self.results[self.ranking[0]]
        if not self._share_results():
            return
        now, plain = self.results[best], self.results[self.baseline]
        if self.took[best] and now <= plain:
            self._decide(best)
            return
        self.failed_checks.append(
            f"{best} took {now * 1e3:.3g} ms a step when it was checked, after {before * 1e3:.3g} in its trial, and "
            f"uncompressed sums {plain * 1e3:.3g}"
        )
        self.ranking = self.ranking[1:]
        self._check_next()

    def _decide(self, chosen: str) -> None:
        """Go on by a candidate, explain it, and settle."""
        if not self._switched(chosen):
            chosen = self.current
        note = "; ".join(self.failed_checks)
        results = dict(self.results)

        def explain() -> tuple[Any, str]:
            self.planner.learned(results)
            return self.planner.explained(chosen, note)

        answers = self._agreed("a plan", self._on_rank_0(explain))
        if answers is not None:
            self.plan, line = answers[0]
            self.say(f"grace: auto: {line}")
            self._settle()

    def _settle(self) -> None:
        """Go on as it is, and watch."""
        self.watch = Watch() if self.backend.size > 1 else None
        if self.replan:
            self.go(self._again, self.replan)
        else:
            self.left = 0
            self.then = self._settle
            self.timer = StepTimer()

    def _again(self) -> None:
        """Measure anew: links and steps may have changed. Uncompressed, since that is the baseline."""
        self.watch = None
        self._switched(self.baseline)
        self.go(self._held, HELD)

    # -- failures -------------------------------------------------------------------------------------

    def _failure(self, compute: Callable[[], Any]) -> str:
        """Compute something of this rank's, and return why it failed; empty if it did not."""
        try:
            compute()
        except ExchangeError:
            raise
        except Exception as error:
            return str(error) if isinstance(error, GraceError) else f"{type(error).__name__}: {error}"
        return ""

    def _on_rank_0(self, compute: Callable[[], Any]) -> Callable[[], Any]:
        return compute if self.backend.rank == 0 else lambda: None

    def _agreed(self, what: str, compute: Callable[[], Any]) -> list[Any] | None:
        """Return what every rank has computed. If it failed on any, planning ends on all, and None is returned."""
        found: list[Any] = []
        why = self._failure(lambda: found.append(compute()))
        answers = gather_or_raise(self.backend, what, (found[0] if found else None, why))
        whose = "rank {}: " if len(answers) > 1 else ""
        failed = next((f"{whose.format(rank)}{reason}" for rank, (_, reason) in enumerate(answers) if reason), "")
        if failed:
            self._give_up(failed)
            return None
        return [value for value, _ in answers]

    def _give_up(self, why: str) -> None:
        """Go on uncompressed, and say why."""
        self.gradients = {}
        self._switched(self.baseline)
        self.say(f"grace: auto: planning failed, and training goes on uncompressed: {why}")
        self._settle()
        self.watch = None

    # -- watching -------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Compare waits with those when the choice was made; plan again, or tell once, if they have grown."""
        watch = self.watch
        assert watch is not None
        if not watch.due(self.timer):
            return
        answers = gather_or_raise(self.backend, "waits", watch.seen())
        # the least wait is that of the rank which comes last: it waits for no other, only for the network
        grown = watch.compare(min(wait for wait, _ in answers), max(step for _, step in answers))
        if not grown:
            return
        advice = "planning again" if self.replan else 'start anew, or let strategy="auto(replan=...)" plan again'
        self.say(f"grace: auto: {grown}: the link is slower, or shared; {advice}")
        self.watch = None
        if self.replan:
            self._again()


class Watch:
    """Looks at a settled run every few steps: how long ranks wait for exchanges, and how long steps take."""

    def __init__(self) -> None:
        self.steps = WATCH_FIRST
        self.timed: list[tuple[float, float]] = []
        self.usual: tuple[float, float] | None = None
        self.times = 0

    def due(self, timer: StepTimer) -> bool:
        """Take the last step's times; return True if it is time to look."""
        self.timed += timer.taken_waits()
        self.steps -= 1
        return self.steps <= 0

    def seen(self) -> tuple[float, float]:
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
        if self.usual is None:
            self.usual = wait, step
            return ""
        before, whole = self.usual
        if wait <= SLOWER * before or wait - before <= FELT * whole:
            self.times = 0
            return ""
        self.times += 1
        if self.times < 2 and wait <= MUCH_SLOWER * before:
            return ""
        return f"steps wait {wait * 1e3:.3g} ms for exchanges, and {before * 1e3:.3g} when this was chosen"
