"""A training step, played through: what computes when, what travels when, and who waits for whom.

The rules are those of the exchanges (:class:`grace.session.step_runner.StepRunner`):

- A bucket starts when its gradients are there and all before it have started. Then computing encodes it, and its first
  collective joins the queue of the wire, which carries one at a time.
- Behind backward, all buckets that have more collectives go on, one collective each in every round: computing waits for
  the one under way, does what comes between, and the next one joins the queue. Then bucket by bucket computing waits
  for the last one and decodes. The optimizer comes after all of them.
- What goes through a root (a parameter server) waits in the same queue, and computing between a gather and its answer
  is the root's: of several roots, whose links are apart, no overlap is supposed.
- Delayed exchanges run beside training, one after the other, from the end of the step that sent them; a step takes no
  less than they do, and the link carries theirs in addition.
- While something travels, computing takes longer by ``contention``.

None of this lets a step become faster when something in it takes longer.
"""

from collections.abc import Sequence

from grace.planner.step import Prediction, Timeline, Work


def simulate(timeline: Timeline, works: Sequence[Work], contention: float = 0.0) -> Prediction:
    """Predict a step, once steps follow each other.

    Args:
        timeline: when gradients are ready. One that it does not name is ready when backward ends.
        works: the buckets, in the order in which ranks start them.
        contention: the part by which computing takes longer while a collective is under way: 0.1 is a tenth.

    >>> from grace.planner.step import Transfer
    >>> timeline = Timeline({"b": 0.1, "w": 0.2}, forward=0.1, backward=0.2)
    >>> send = Transfer("allreduce", seconds=0.15)
    >>> simulate(timeline, [Work(("b",), transfers=(send,)), Work(("w",), transfers=(send,))]).step
    0.5
    """
    return _SimulatedStep(timeline, works, contention).run()


class _SimulatedStep:
    """One step of the rank that takes longest."""

    def __init__(self, timeline: Timeline, works: Sequence[Work], contention: float):
        self.timeline, self.works = timeline, works
        self.slower = 1.0 + contention
        self.exposed = [i for i, work in enumerate(works) if not work.delayed]
        """Numbers of the buckets that the step waits for."""
        self.time = self.codec = 0.0
        self.free = 0.0
        """When the engine can carry one more."""
        self.busy = 0.0
        """When all that was started is done."""
        self.done = [0.0] * len(works)
        """When the last collective that a bucket has started is done."""
        self.events: list[tuple[str, int, float, float]] = []

    def run(self) -> Prediction:
        """Play the step through."""
        beside, carried = self._delayed()
        self.busy = beside
        self._compute("compute", -1, self.timeline.forward)
        self._backward()
        self._further_rounds()
        for i in self.exposed:
            self._wait(i)
            self._encode("finish", i, self.works[i].finish)
        self._compute("compute", -1, self.timeline.optimizer)
        own = sum(transfer.seconds for i in self.exposed for transfer in self.works[i].transfers)
        step = max(self.time, beside, carried + own if carried else 0.0)
        compute = self.timeline.compute
        return Prediction(
            step=round(step, 12),
            compute=compute,
            codec=self.codec,
            exposed=max(0.0, step - compute - self.codec),
            sent=most_sent(self.works),
            memory=sum(work.memory for work in self.works),
            events=self.events,
        )

    def _compute(self, what: str, i: int, seconds: float) -> None:
        """Go on computing; slower while something is under way, which it is without a break until ``busy``."""
        begin = self.time
        slowed = min(seconds, max(0.0, self.busy - begin) / self.slower)
        self.time += slowed * self.slower + (seconds - slowed)
        if seconds > 0:
            self.events.append((what, i, begin, self.time))

    def _encode(self, what: str, i: int, seconds: float) -> None:
        """Let a bucket's codec compute: its "start", "middle" or "finish"."""
        self._compute(what, i, seconds)
        self.codec += seconds

    def _wait(self, i: int) -> None:
        """Wait for the collective of a bucket that is under way."""
        self.time = max(self.time, self.done[i])

    def _launch(self, i: int, number: int) -> None:
        """Let a bucket's collective join the queue."""
        begin = max(self.time, self.free)
        end = begin + self.works[i].transfers[number].seconds
        self.free = self.done[i] = end
        self.busy = max(self.busy, end)
        self.events.append(("wire", i, begin, end))

    def _delayed(self) -> tuple[float, float]:
        """Return the seconds of exchanges beside training, and those of them in which they occupy the link."""
        beside = carried = 0.0
        for i, work in enumerate(self.works):
            if not work.delayed:
                continue
            parts: list[tuple[str, float]] = []
            for transfer in work.transfers:
                carried += transfer.seconds
                parts += [("middle", work.middle), ("wire", transfer.seconds)]
            for what, seconds in [*parts[1:], ("finish", work.finish)]:
                self.events.append((what, i, beside, beside + seconds))
                beside += seconds
        return beside, carried

    def _backward(self) -> None:
        """Play backward through, and the buckets that start in it."""
        ready, end, done = self.timeline.ready, self.timeline.backward, 0.0
        for i, work in enumerate(self.works):
            need = max([ready.get(name, end) for name in work.names], default=0.0)
            self._compute("compute", -1, max(0.0, need - done))
            done = max(done, need)
            self._encode("start", i, work.start)
            if work.transfers and not work.delayed:
                self._launch(i, 0)
        self._compute("compute", -1, end - done)

    def _further_rounds(self) -> None:
        """Play through the collectives that follow the first ones, round by round."""
        most = max((len(self.works[i].transfers) for i in self.exposed), default=0)
        for number in range(1, most):
            for i in self.exposed:
                if number < len(self.works[i].transfers):
                    self._wait(i)
                    self._encode("middle", i, self.works[i].middle)
                    self._launch(i, number)


def most_sent(works: Sequence[Work]) -> float:
    """Return the bytes that leave the rank that sends most, in a step."""
    transfers = [transfer for work in works for transfer in work.transfers]
    more: dict[int, float] = {}
    for transfer in transfers:
        if transfer.root >= 0:
            more[transfer.root] = more.get(transfer.root, 0.0) + transfer.root_nbytes - transfer.nbytes
    return sum(transfer.nbytes for transfer in transfers) + max(0.0, max(more.values(), default=0.0))
