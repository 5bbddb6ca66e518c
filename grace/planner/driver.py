"""``strategy="auto"`` while a run trains: what is measured at which step, what is tried, and what is kept.

All ranks count the same steps, so that each comes to every collective of this module between the same two steps:

1. a few steps to warm up;
2. a few whose exchanges begin after backward: when each gradient is there, computing alone;
3. a few plain ones, uncompressed, as a baseline;
4. the links, and what candidates' codecs take on this model's gradients; rank 0 plans;
5. the best candidates and the baseline in turns, some steps each; the fastest is kept, by all ranks;
6. some steps more: if they are not faster than the baseline, all go back to it.

``replan`` steps later it begins anew at 2. What fails while planning ends in the baseline and a line that says so.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from grace.core.backend import Backend
from grace.errors import ConfigError, ExchangeError, GraceError
from grace.planner.clock import Clock, undisturbed
from grace.planner.step import Timeline
from grace.session.agreement import gather_or_raise
from grace.strategy.plan import Strategy

WARM, HELD, PLAIN = 3, 7, 6
"""Steps of each phase before planning."""
SETTLED, TIMED, ROUNDS = 1, 3, 2
"""Steps after a switch that do not count, steps that do, and how often each candidate has its turn."""
CHECKED = 10
MARGIN = 0.03
"""By how much a candidate must be faster than the baseline."""


class Tried(Protocol):
    """A candidate, as a planner gives it."""

    @property
    def name(self) -> str:
        """What it is called, unlike all others."""
        ...

    @property
    def strategy(self) -> Strategy:
        """It."""
        ...


class Planner(Protocol):
    """What is done between steps; see :class:`grace.planner.planning.Planning`."""

    @property
    def seconds(self) -> float:
        """About what measuring and planning takes."""
        ...

    def measure(self, gradients: Mapping[str, Any], timeline: Timeline, plain: float) -> None:
        """Every rank calls it: the links, and the codecs on these gradients."""
        ...

    def candidates(self) -> Sequence[Tried]:
        """On rank 0: what is worth a try, best first, the baseline too."""
        ...

    def learned(self, seconds: Mapping[str, float]) -> None:
        """On rank 0: what steps of candidates took, by name."""
        ...

    def explained(self, chosen: str, why: str) -> tuple[Any, str]:
        """On rank 0: the plan as its users see it, a document, and in one line."""
        ...


class Resumed(NamedTuple):
    """What a checkpoint says of planning.

    Attributes:
        current: what the strategy is called that the run had.
        strategy: its document.
        plan: what was chosen, and why; None before.
        settled: whether it was chosen, and not only tried.
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
        planner: measures, searches and explains.
        backend: over which the ranks agree.
        start: the strategy that the run begins with: everything summed uncompressed.
        switch: goes on by a strategy; every rank calls it.
        say: prints a line, on rank 0.
        replan: after how many steps all is measured again; 0 for never.
        baseline: what a candidate that exchanges everything uncompressed is called.
    """

    def __init__(
        self,
        planner: Planner,
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
        self.cluster = [start.world_size, start.nodes]
        self.clock = Clock()
        self.gradients: dict[str, Any] = {}
        self.plain: list[float] = []
        self.timeline: Timeline | None = None
        self.turns: list[str] = []
        """Names of those that are to be tried, in order."""
        self.took: dict[str, list[float]] = {}
        self.held_steps, self.plain_steps = HELD, PLAIN
        """Steps of the second and third phase."""
        self.current = baseline
        self.plan: Any = None
        """What was chosen, and why; a document, the same on all ranks. None before."""
        self.go(self._warm, WARM)

    def go(self, then: Callable[[], None], steps: int) -> None:
        """Do something when so many steps more are made."""
        self.then, self.left, self.skip = then, steps, SETTLED
        self.clock = Clock()

    # -- what a session tells -------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether exchanges are to begin after backward only."""
        return self.then == self._held

    @property
    def watching(self) -> bool:
        """Whether anything of the next step is to be told."""
        return self.left > 0

    def ready(self, name: str) -> None:
        """A variable's gradient is there."""
        self.clock.ready(name)

    def computed(self, gradients: Callable[[], Mapping[str, Any]]) -> None:
        """Backward is done; exchanges are awaited.

        Args:
            gradients: copies of this rank's own.
        """
        self.clock.mark("computed")
        if self.holds and self.left == 1:
            self.gradients = dict(gradients())
            self.clock.now["computed"] = None  # a copy was made meanwhile

    def exchanged(self) -> None:
        """Gradients are means."""
        self.clock.mark("exchanged")

    def stepped(self) -> None:
        """The optimizer has made its step."""
        if not self.left:
            return
        self.clock.end(self.skip <= 0)
        self.skip -= 1
        self.left -= 1
        if self.left == 0:
            self.then()
            self.clock.begin()

    # -- checkpoints ----------------------------------------------------------------------------------

    def document(self) -> str:
        """What a checkpoint holds of planning; empty once the user chose."""
        if not self.current:
            return ""
        about = {"current": self.current, "strategy": self.strategies[self.current].to_dict(), "plan": self.plan}
        left = self.left if self.then == self._again else 0
        return json.dumps({**about, "settled": self.settled, "left": left, "cluster": self.cluster})

    def found(self, saved: Mapping[str, Any] | None) -> "Resumed | None":
        """What a checkpoint says of planning; None if nothing, or for another cluster.

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
        if resumed.settled:
            self._wait()
            self.left = resumed.left
        else:
            self.go(self._again, 1)

    @property
    def settled(self) -> bool:
        """Whether a choice was made, and checked."""
        return self.left == 0 or self.then == self._again

    def stop(self) -> None:
        """The user chose another strategy: nothing more is measured, tried, or saved of planning."""
        self.go(self._wait, 0)
        self.plan, self.gradients, self.current = None, {}, ""

    # -- phases ---------------------------------------------------------------------------------------

    def _warm(self) -> None:
        self.go(self._held, self.held_steps)

    def _held(self) -> None:
        self.timeline = self.clock.timeline(self.names)
        self.go(self._measured, self.plain_steps)

    def _measured(self) -> None:
        """Measure the links and codecs, plan, and begin to try."""
        self.plain = self.clock.seconds()
        complete = bool(self.plain and self.timeline and self.gradients)
        measured = gather_or_raise(self.backend, "steps to plan by", complete)
        if not all(measured):
            rank = measured.index(False)
            self._give_up(f"rank {rank} has seen no whole step: one backward pass, then optimizer.step()")
            return
        assert self.timeline is not None
        seconds = max(1, round(self.planner.seconds))
        self.say(f"grace: auto: measuring links and methods, then planning; about {seconds} s")
        trials: list[tuple[str, Strategy]] | None = None
        why = ""
        try:
            self.planner.measure(self.gradients, self.timeline, undisturbed(self.plain))
            if self.backend.rank == 0:
                trials = [(one.name, one.strategy) for one in self.planner.candidates()]
        except ExchangeError:  # the engine failed
            raise
        except Exception as error:
            why = str(error) if isinstance(error, GraceError) else f"{type(error).__name__}: {error}"
        self.gradients = {}
        told = gather_or_raise(self.backend, "what to try", (why, trials))
        whose = "rank {}: " if len(told) > 1 else ""
        failed = next((f"{whose.format(rank)}{reason}" for rank, (reason, _) in enumerate(told) if reason), "")
        if failed:
            self._give_up(failed)
            return
        self.strategies = {self.baseline: self.strategies[self.baseline]}
        for name, strategy in told[0][1]:
            self.strategies.setdefault(name, strategy)
        self.turns = [name for _ in range(ROUNDS) for name in self.strategies]
        self.took = {name: [] for name in self.strategies}
        self._next()

    def _next(self) -> None:
        """The next candidate's turn, or the end of trying."""
        while self.turns and not self._switched(self.turns[0]):
            self.turns = [name for name in self.turns if name != self.turns[0]]
        if self.turns:
            self.go(self._tried, SETTLED + TIMED)
        else:
            self._choose()

    def _switched(self, name: str) -> bool:
        """Whether all ranks go on by it; else by what they went on by before."""
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
        self.took[self.turns.pop(0)] += self.clock.seconds()
        self._next()

    def _choose(self) -> None:
        """All go on by the candidate that was fastest."""
        medians = {name: statistics.median(seconds) for name, seconds in self.took.items() if seconds}
        everyone = gather_or_raise(self.backend, "what trials took", medians)
        shared = [name for name in everyone[0] if all(name in one for one in everyone)]
        slowest = {name: max(one[name] for one in everyone) for name in shared}
        if self.baseline not in slowest:
            self._give_up("no uncompressed step was measured")
            return
        plain = slowest[self.baseline]
        best = min(slowest, key=lambda name: slowest[name])
        if slowest[best] > (1 - MARGIN) * plain:
            best = self.baseline
        if not self._switched(best):
            best = self.current
        self._explain(best, slowest)
        self.go(self._checked, CHECKED)

    def _explain(self, chosen: str, seconds: Mapping[str, float], back: str = "") -> None:
        made = None
        if self.backend.rank == 0:
            self.planner.learned(seconds)
            made, line = self.planner.explained(chosen, back)
            self.say(f"grace: auto: {line}")
        self.plan = gather_or_raise(self.backend, "a plan", made)[0]
        self.expected = seconds

    def _checked(self) -> None:
        """Go back if the choice does not hold what it promised."""
        mine = statistics.median(self.clock.seconds() or [0.0])
        seconds = max(gather_or_raise(self.backend, "the chosen strategy's steps", mine))
        plain = self.expected[self.baseline]
        if self.current != self.baseline and seconds > plain:
            chosen = self.current
            back = (
                f"{chosen} took {seconds * 1e3:.3g} ms a step instead of {self.expected[chosen] * 1e3:.3g}: back to "
                f"uncompressed sums, which took {plain * 1e3:.3g}"
            )
            if self._switched(self.baseline):
                self._explain(self.baseline, {**self.expected, chosen: seconds}, back)
        self._wait()

    def _wait(self) -> None:
        if self.replan:
            self.go(self._again, self.replan)
        else:
            self.left = 0

    def _again(self) -> None:
        """Measure anew: links and steps may have changed. Uncompressed, since that is the baseline."""
        self._switched(self.baseline)
        self.go(self._held, self.held_steps)

    def _give_up(self, why: str) -> None:
        self.gradients = {}
        self.say(f"grace: auto: training goes on uncompressed: {why}")
        self._wait()
