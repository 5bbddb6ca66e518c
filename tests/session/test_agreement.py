"""Before anything is exchanged the ranks compare what they are about to do."""

import pytest

from grace import ConfigError, RankError
from grace.core.backend import LocalBackend
from grace.core.context import Context
from grace.core.variable import Variable
from grace.session.agreement import compare_facts
from grace.session.bucket_limits import Limits
from grace.session.exchange_plan import UniformPlan
from grace.session.setup import build_step_runner


class Disagreeing(LocalBackend):
    """One rank of two; what the other one sends is given."""

    size = 2

    def __init__(self, facts, error=None, **different):
        self.facts, self.error, self.different, self.calls = facts, error, different, 0

    def allgather_object(self, value):
        self.calls += 1
        if isinstance(value, dict):  # the digests
            return [value, {**value, "value": ("their digest", None), "error": self.error, **self.different}]
        return [value, self.facts]


VARIABLES = (("a", (30, 4)), ("b", (40, 5)))
FACTS = [("the seed", "0"), ("variable 'a'", "float32[3]"), ("variable 'b'", "float32[4]")]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ([*FACTS[:1], ("variable 'a'", "float32[5]"), *FACTS[2:]],
         r"rank 0 has variable 'a' float32\[3\], rank 1 has variable 'a' float32\[5\]"),
        ([("the seed", "1"), *FACTS[1:]], "rank 0 has the seed 0, rank 1 has the seed 1"),
        (FACTS[:2], r"rank 0 has variable 'b' float32\[4\], rank 1 has nothing more"),
        ([*FACTS, ("variable 'c'", "float32[1]")], r"rank 0 has nothing more, rank 1 has variable 'c' float32\[1\]"),
    ],
)  # fmt: skip
def test_the_first_difference_is_named_with_both_sides(theirs, message):
    with pytest.raises(RankError, match=message):
        compare_facts(Disagreeing(theirs), FACTS)


def test_a_failure_elsewhere_is_raised_here_with_its_reason():
    with pytest.raises(RankError, match="rank 1 refused to start: unknown compressor 'x'"):
        compare_facts(Disagreeing([], "unknown compressor 'x'"), FACTS)


def test_another_grace_is_named_before_anything_else_is_compared():
    with pytest.raises(RankError, match=r"rank 0 has Grace 0\.1\.0, rank 1 has Grace 9\.0\. Install the same version"):
        compare_facts(Disagreeing([], "unknown compressor 'x'", grace="9.0"), FACTS)


@pytest.mark.parametrize("answer", [("their digest", None), None, {"what": "none"}])
def test_a_grace_that_says_other_things_is_told_of(answer):
    backend = Disagreeing([])
    backend.allgather_object = lambda value: [value, answer]
    with pytest.raises(RankError, match=r"rank 1 runs a Grace that rank 0's \(0\.1\.0\) does not understand"):
        compare_facts(backend, FACTS)


def test_a_rank_that_fails_still_takes_part_in_the_comparison():
    backend = Disagreeing([])

    def variables():
        raise ConfigError("no names")

    with pytest.raises(ConfigError, match="no names"):
        build_step_runner(variables, lambda: UniformPlan("topk", None, None), backend, Context())
    assert backend.calls == 1


@pytest.mark.parametrize("change", ["seed", "shape", "dtype", "name", "order", "compressor", "group_bytes", "setting"])
def test_whatever_ranks_must_share_is_a_fact(change):
    def facts(seed=0, variables=VARIABLES, dtype="float32", compressor="topk", size=1 << 20, **s):
        listed, backend, sent = [Variable(name, shape, dtype) for name, shape in variables], LocalBackend(), []
        backend.allgather_object = lambda value: sent.append(value["value"][0]) or [value]
        uniform = UniformPlan(compressor, None, None, Limits(group_bytes=size))
        build_step_runner(lambda: listed, lambda: uniform, backend, Context(seed=seed), list(s.items()))
        return sent

    changed = {
        "seed": {"seed": 1},
        "shape": {"variables": (("a", (4, 30)), ("b", (40, 5)))},
        "dtype": {"dtype": "float16"},
        "name": {"variables": (("a", (30, 4)), ("c", (40, 5)))},
        "order": {"variables": (("b", (40, 5)), ("a", (30, 4)))},
        "compressor": {"compressor": "topk(ratio=0.02)"},
        "group_bytes": {"size": 16},
        "setting": {"average": "1"},
    }[change]
    assert facts() == facts()
    assert facts() != facts(**changed)
