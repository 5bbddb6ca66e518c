"""A training step, played through: what computes when, what travels when, and who waits for whom.

The rules are those of the exchanges (:class:`grace.session.step_runner.StepRunner`):

- A bucket starts when its gradients are there and all before it have started. Then computing encodes it, and its first
  collective joins the queue of the wire, which carries one at a time.
- Behind backward, all buckets that have more collectives go on, one collective each in every round: computing waits for
  the one under way, does what comes between, and the next one joins the queue. Then bucket by bucket computing waits
  for the last one and decodes. The optimizer comes after all of them.
- What goes through a root (a parameter server) waits in the same queue, and computing between a gather and its answer
  is the root's: of several roots, whose links are apart, no overlap is supposed.
- In a hierarchical exchange computing waits for the sum over the node before it encodes, and for what the leader hands
  on after it has decoded; both use links of their own, within the node.
- Delayed exchanges run beside training, one after the other, from the end of the step that sent them; a step takes no
  less than they do, and the link carries theirs in addition.
- While something travels, computing takes longer by ``contention``.

None of this lets a step become faster when something in it takes longer.
"""

from collections.abc import Sequence

from grace.planner.step import Prediction, Timeline, Transfer, Work


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
    return _Step(timeline, works, contention).run()


class _Step:
    """One step of the rank that takes longest."""

    def __init__(self, timeline: Timeline, works: Sequence[Work], contention: float):
        self.timeline, self.works = timeline, works
        self.slower = 1.0 + contention
        self.free = 0.0
        """When the engine can carry one more."""
        self.time = self.codec = 0.0
        self.busy = 0.0
        """When all that was started is done."""
        self.done = [0.0] * len(works)
        """When the last collective that a bucket has started is done."""
        self.events: list[tuple[str, int, float, float]] = []

    def run(self) -> Prediction:
        """Play the step through."""
        beside, carried = self._delayed()
        self.busy = beside
        self._model(self.timeline.forward)
        self._backward()
        self._go_on()
        self._finish()
        self._model(self.timeline.optimizer)
        own = sum(t.seconds for w in self.works if not (w.delayed or w.period) for t in w.transfers)
        step = max(self.time, beside, carried + own if carried else 0.0) + self._averages()
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

    def _compute(self, seconds: float) -> None:
        """Go on computing; slower while something is under way, which it is without a break until ``busy``."""
        free = self.busy - self.time
        if free > 0:
            done = free / self.slower
            if seconds <= done:
                self.time += seconds * self.slower
                return
            self.time, seconds = self.busy, seconds - done
        self.time += seconds

    def _model(self, seconds: float) -> None:
        """Let the model compute."""
        if seconds > 0:
            begin = self.time
            self._compute(seconds)
            self.events.append(("compute", -1, begin, self.time))

    def _encode(self, what: str, i: int, seconds: float) -> None:
        """Let a bucket's codec compute: its "start", "middle" or "finish"."""
        begin = self.time
        self._compute(seconds)
        self.codec += seconds
        self.events.append((what, i, begin, self.time))

    def _wait(self, until: float) -> None:
        self.time = max(self.time, until)

    def _launch(self, i: int, number: int, ready: float) -> None:
        """Let a bucket's collective join the queue."""
        begin = max(ready, self.free)
        end = self.free = begin + self.works[i].transfers[number].seconds
        self.done[i] = end
        self.busy = max(self.busy, end)
        self.events.append(("wire", i, begin, end))

    # -- the parts of a step ---------------------------------------------------------------------------

    def _delayed(self) -> tuple[float, float]:
        """Return the seconds of exchanges beside training, and those of them in which they occupy the link."""
        beside = carried = 0.0
        for i, work in enumerate(self.works):
            if not work.delayed:
                continue
            for number, transfer in enumerate(work.transfers):
                if number:
                    self.events.append(("middle", i, beside, beside + work.middle))
                    beside += work.middle
                self.events.append(("wire", i, beside, beside + transfer.seconds))
                beside, carried = beside + transfer.seconds, carried + transfer.seconds
            self.events.append(("finish", i, beside, beside + work.finish))
            beside += work.finish
        return beside, carried

    def _backward(self) -> None:
        """Play backward through, and the buckets that start in it."""
        ready, end, done = self.timeline.ready, self.timeline.backward, 0.0
        for i, work in enumerate(self.works):
            if work.period:
                continue
            need = max([ready.get(name, end) for name in work.names], default=0.0)
            if need > done:
                self._model(need - done)
                done = need
            self._within_node(i, work.node_sum)
            self._encode("start", i, work.start)
            if work.transfers and not work.delayed:
                self._launch(i, 0, self.time)
        self._model(end - done)

    def _go_on(self) -> None:
        """Play through the collectives that follow the first ones, round by round."""
        under_way = [i for i, work in enumerate(self.works) if not work.delayed and not work.period]
        number = 0
        while True:
            number += 1
            under_way = [i for i in under_way if len(self.works[i].transfers) > number]
            if not under_way:
                return
            for i in under_way:
                self._wait(self.done[i])
                self._encode("middle", i, self.works[i].middle)
                self._launch(i, number, self.time)

    def _finish(self) -> None:
        """Play through decoding, bucket by bucket."""
        for i, work in enumerate(self.works):
            if work.delayed or work.period:
                continue
            self._wait(self.done[i])
            self._encode("finish", i, work.finish)
            self._within_node(i, work.node_share)

    def _within_node(self, i: int, transfers: Sequence[Transfer]) -> None:
        """Wait for collectives within the node."""
        if transfers:
            begin = self.time
            self.time += sum(transfer.seconds for transfer in transfers)
            self.events.append(("inside", i, begin, self.time))

    def _averages(self) -> float:
        """Return the seconds per step of averages now and then."""
        total = 0.0
        for work in self.works:
            if work.period:
                codec = (work.start + work.finish) / work.period
                self.codec += codec
                total += codec + sum(transfer.seconds for transfer in work.transfers) / work.period
        return total


def most_sent(works: Sequence[Work]) -> float:
    """Return the bytes that leave the rank that sends most, in a step; of a hierarchical exchange that is a leader."""
    usual, more = 0.0, dict[int, float]()
    for work in works:
        usual += sum(transfer.nbytes for transfer in work.node_sum)
        usual += sum(transfer.root_nbytes for transfer in work.node_share)
        for transfer in work.transfers:
            usual += transfer.nbytes / max(1, work.period)
            if transfer.root >= 0:
                more[transfer.root] = more.get(transfer.root, 0.0) + transfer.root_nbytes - transfer.nbytes
    return usual + max(0.0, max(more.values(), default=0.0))
