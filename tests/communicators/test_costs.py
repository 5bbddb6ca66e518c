"""The formulas of communicators' costs, as ``grace list --long`` shows them, beside the bytes of their routes."""

import pytest

from grace.core.registry import known, legal_communicators, make
from grace.core.route import Carries, EngineTraits

RANKS, PAYLOAD = 5, 1e9


@pytest.mark.parametrize("name", sorted(known("communicator")))
def test_a_cost_is_the_sum_over_the_route(name):
    """Pieces of a payload have p / W bytes, so a formula with "~" leaves out the factor (W-1)/W."""
    method = next(spec for spec in known("compressor") if name in legal_communicators(make("compressor", spec)))
    route = known("communicator")[name](method).route_of_wire(PAYLOAD, EngineTraits(ranks=RANKS))
    rank = 1  # none that averages for the others
    sent = sum(
        leg.sent(PAYLOAD / RANKS if leg.root is None and leg.carries is not Carries.GRADIENTS else PAYLOAD, RANKS, rank)
        for leg in route
    )
    formula = known("communicator")[name].cost.partition(";")[0]
    names = {"p": PAYLOAD * (RANKS - 1) / RANKS if formula.startswith("~") else PAYLOAD, "W": RANKS}
    said = eval(formula.lstrip("~").replace("2p", "2*p").replace(")p", ")*p"), names)
    assert said == pytest.approx(sent)
