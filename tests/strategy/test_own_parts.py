"""Communicators of users' as types of ``sync``: trained with on real ranks, and refused by name."""

import pytest

pytest.importorskip("pydantic", reason="pydantic is not installed")

import grace
from grace.core.registry import make
from grace.core.variable import Variable
from grace.strategy import Sync, schema
from grace.strategy.builder import Builder, OneNode
from grace.strategy.builders.all_reduce import AllReduce
from grace.strategy.predicted_bytes import collectives_of
from tests.support.own_parts import InPieces, Named, PiecesOf, Whole, registered
from tests.support.pools import launched
from tests.support.strategies import assert_close, executed, mixed, on_the_mean, train, weights
from tests.support.training import digest

STEPS = range(3)
LIST = [Variable("w", (40, 8)), Variable("b", (8,))]


def trained(strategy, known=(True, True)):
    """Weights, or why not; how many pieces were sent; and the weights of plain training afterwards."""
    with registered(*((InPieces, PiecesOf, Whole) if known[grace.rank()] else ())):
        model, InPieces.sent = mixed(), 0
        try:
            optimizer = executed(model, strategy)
        except grace.GraceError as error:
            after = mixed()
            train(after, executed(after, "all_reduce"), STEPS)
            return str(error), digest(weights(after))
        train(model, optimizer, STEPS)
        return weights(model), InPieces.sent, optimizer.strategy.to_dict()["variables"]["dense.weight"]["sync"]


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["gloo", "horovodrun-gloo", "mpirun-mpi"])
def test_a_registered_communicator_carries_what_a_strategy_gives_it(engine):
    answers = launched(engine, 2).run(trained, "uniform(communicator=in_pieces(most=50))")
    for got, sent, sync in answers:
        assert_close(got, on_the_mean(mixed(), 2, STEPS))
        assert sent > 10
        assert sync == {"type": "in_pieces", "group": sync["group"], "most": 50}


def test_a_file_and_a_builder_of_the_users_mean_the_same(two_ranks, tmp_path):
    rule = {"match": {}, "sync": {"type": "in_pieces", "most": 16}, "compressor": "topk(ratio=0.5)"}
    document = {"version": 1, "cluster": {"world_size": 2}, "rules": [rule]}
    first = two_ranks.run(trained, document)
    second = two_ranks.run(trained, "pieces_of(most=16, compressor=topk(ratio=0.5))")
    assert digest(first[0][0]) == digest(first[1][0]) == digest(second[0][0]) == digest(second[1][0])
    assert first[0][1:] == second[0][1:]


@pytest.mark.parametrize(
    ("strategy", "unknown"),
    [("pieces_of", "communicator 'in_pieces'"), ("all_reduce(compressor=whole)", "compressor 'whole'")],
)
def test_a_rank_that_does_not_know_a_part_refuses_and_leaves_nobody_waiting(two_ranks, strategy, unknown):
    (first, after), (second, then) = two_ranks.run(trained, strategy, (True, False))
    assert f"rank 1 refused to start: unknown {unknown}" in first
    assert f"unknown {unknown}" in second
    assert after == then


def parsed(sync, **more):
    return schema.parse({"version": 1, "variables": {"w": {"shape": [40, 8], "sync": sync, **more}}}, "s.yaml")


def test_defaults_are_filled_in_and_survive_a_round_trip(tmp_path):
    with registered(InPieces):
        short, full = parsed({"type": "in_pieces"}), parsed({"type": "in_pieces", "group": 0, "most": 64})
        assert short.id == full.id != parsed({"type": "in_pieces", "most": 65}).id
        schema.dump(full, tmp_path / "s.yaml")
        assert schema.load(tmp_path / "s.yaml").id == full.id


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (
            {"type": "in_piece"},
            r"s.yaml.*type 'in_piece' is not known \(did you mean 'in_pieces'\?\); known: .*in_pieces",
        ),
        (
            {"type": "in_pieces", "mots": 3},
            r"w.sync.mots: unknown key \(did you mean 'most'\?\); known: .*, most",
        ),
        ({"type": "in_pieces", "most": 0}, r"variable 'w', sync: most must be positive"),
        ({"type": "in_pieces", "most": "many"}, r"variable 'w', sync: .*'<' not supported"),
        ({"type": "in_pieces", "group": -1}, r"variables.w.sync.group: must be a whole number of at least 0, not -1"),
        ({}, r"variables.w.sync.type: is missing"),
    ],
)
def test_what_its_signature_does_not_take_is_refused(sync, message):
    with registered(InPieces), pytest.raises(grace.ConfigError, match=message):
        parsed(sync)


def test_a_wrong_method_is_not_blamed_on_the_communicator():
    with registered(InPieces):
        with pytest.raises(grace.ConfigError, match=r"variable 'w', compressor: unknown compressor 'topq'"):
            parsed({"type": "in_pieces"}, compressor="topq")
        with pytest.raises(grace.ConfigError, match=r"variable 'w', sync: in_pieces cannot carry powersgd"):
            parsed({"type": "in_pieces"}, compressor="powersgd")


def test_parameters_that_a_sync_has_already_are_refused():
    class Grouped(InPieces):
        name = "grouped_for_the_test"

        def __init__(self, compressor="none", memory=None, group=0):
            super().__init__(compressor, memory)

    with registered(Grouped), pytest.raises(grace.ConfigError, match="has a parameter 'group', which a strategy"):
        parsed({"type": "grouped_for_the_test"})


def test_parameters_of_bases_count_where_options_are_passed_on():
    class Wider(InPieces):
        name = "wider_for_the_test"

        def __init__(self, *parts, least=1, **options):
            super().__init__(*parts, **options)

    with registered(Wider):
        assert Wider.parameters() == {"least": 1, "most": 64}
        (part,) = parsed({"type": "wider_for_the_test", "most": 7}).plans[0].parts
        assert part.sync.options == {"least": 1, "most": 7}


@pytest.mark.parametrize(
    ("communicator", "wanted"),
    [
        ("scatter_reduce", Sync("scatter_reduce")),
        ("reduce_broadcast(destination=1, staleness=2)", Sync("reduce_broadcast", destination=1, staleness=2)),
        ({"name": "in_pieces", "most": 3}, Sync("in_pieces", options={"most": 3})),
        ("none(period=4)", Sync("none", period=4)),
    ],
)
def test_uniform_takes_any_communicator_with_its_parameters(communicator, wanted):
    with registered(InPieces):
        builder = make("builder", {"name": "uniform", "communicator": communicator})
        assert {plan.parts[0].sync for plan in builder.build(LIST, OneNode(2)).plans} == {wanted}


@pytest.mark.parametrize(
    ("communicator", "message"),
    [
        ("allreduce(rings=2)", "sync allreduce, rings: unknown key; known: type, group"),
        ("in_pieces(rings=2)", "sync in_pieces, rings: unknown key; known: type, .*, most"),
        ("ring", "sync ring: type 'ring' is not known; known: .*in_pieces"),
    ],
)
def test_uniform_refuses_others(communicator, message):
    with registered(InPieces), pytest.raises(grace.ConfigError, match=message):
        make("builder", {"name": "uniform", "communicator": communicator}).build(LIST, OneNode(2))


RULES = [
    {"match": {"rule": "named(end=w)"}, "sync": {"type": "allgather"}, "compressor": "topk"},
    {"match": {}, "sync": {"type": "allreduce"}},
]


def test_a_rule_of_the_users_chooses_in_files_and_in_builders():
    with registered(Named):
        read = schema.parse({"version": 1, "rules": RULES}, "s.yaml", LIST)
        built = make(
            "builder", {"name": "all_reduce", "compressor": [{"match": RULES[0]["match"], "compressor": "topk"}]}
        )
        for strategy in (read, built.build(LIST, OneNode(1))):
            assert [plan.parts[0].sync.type for plan in strategy.plans] == ["allgather", "allreduce"]
            assert [plan.parts[0].compressor for plan in strategy.plans] == ["topk", "none"]


def test_the_rule_of_rows_counts_them():
    rules = [{**RULES[0], "match": {"rule": {"name": "rows", "least": 20, "most": 40}}}, RULES[1]]
    found = [Variable("a", (20, 9)), Variable("b", (19, 9)), Variable("c", (41, 9)), Variable("d", ())]
    read = schema.parse({"version": 1, "rules": rules}, "s.yaml", found)
    assert [plan.parts[0].sync.type for plan in read.plans] == ["allgather", *["allreduce"] * 3]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("nmaed(end=w)", r"s.yaml, rules\[0\].match.rule: unknown rule 'nmaed' \(did you mean 'named'"),
        ("named", r"s.yaml, rules\[0\].match.rule: rule named needs end"),
        ("rows(least=5, most=2)", r"match.rule: rows: most must be a whole number in \[5"),
        ("named(end=3)", r"s.yaml: rule named\(end=3\) cannot tell whether it is for 'w': endswith"),
    ],
)
def test_rules_that_cannot_be_are_refused(rule, message):
    with registered(Named), pytest.raises(grace.ConfigError, match=message):
        schema.parse({"version": 1, "rules": [{**RULES[0], "match": {"rule": rule}}, RULES[1]]}, "s.yaml", LIST)


def test_what_it_sends_is_counted_as_what_it_is_like():
    class Summed(InPieces):
        name = "summed_for_the_test"
        sums = True

    with registered(InPieces, Summed):
        (part,) = parsed({"type": "in_pieces"}).plans[0].parts
        assert collectives_of(part) == ["allgather"]
        (part,) = parsed({"type": "summed_for_the_test"}).plans[0].parts
        assert collectives_of(part) == ["allreduce"]


class ChoosesText(AllReduce):
    """A builder that forgets the memory."""

    name = "chooses_text"

    def choice(self, variable):
        return "topk"


class BuildsNothing(Builder):
    """A builder that forgets to return its strategy."""

    name = "builds_nothing"

    def build(self, variables, resources):
        self.strategy([], resources)


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (ChoosesText(), r"chooses_text: choice\(\) must return two things, \(compressor, memory\), not 'topk'"),
        (BuildsNothing(), r"builds_nothing: build\(\) must return a Strategy, .* not a NoneType"),
    ],
)
def test_mistakes_of_users_builders_are_named(builder, words):
    with pytest.raises(grace.ConfigError, match=words):
        builder.build(LIST, OneNode(2))
