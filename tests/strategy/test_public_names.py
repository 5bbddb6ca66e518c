"""Public names of ``grace.strategy``."""

import grace
from grace.core.registry import known
from grace.core.variable import Variable
from grace.strategy import Rule, ShardPlan, Strategy, StrategyBuilder, Sync, VariablePlan, builders
from grace.strategy.builder import OneNode


def test_every_builder_is_there_by_its_class():
    own = {cls for cls in known("builder").values() if cls.__module__.startswith("grace.strategy.")}
    assert {getattr(builders, name) for name in builders.__all__} == own


def test_a_builder_and_a_rule_are_written_with_these_names_alone():
    class Last(StrategyBuilder):
        name = "last_for_the_test"

        def build(self, variables, resources):
            part = ShardPlan(Sync("reduce_broadcast", destination=resources.world_size - 1))
            return self.strategy([VariablePlan(v, (part,)) for v in variables], resources)

    class Long(Rule):
        name = "long_for_the_test"

        def fits(self, variable):
            return variable.numel > 5

    made = Last().build([Variable("w", (3, 2))], OneNode(4))
    assert isinstance(made, Strategy)
    assert made.plans[0].parts[0].sync.destination == 3
    assert Long().fits(made.variables[0])
    assert isinstance(builders.Parallax(compressor=grace.make("compressor", "topk")), StrategyBuilder)
