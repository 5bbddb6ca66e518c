"""``grace bench compare``: which rows are matched, what counts as a change, and what it says."""

import pytest

from grace.bench.compare import BETTER, SAME, UNKNOWN, WORSE
from grace.bench.compare import compare_results as compare
from grace.errors import ConfigError
from tests.support.bench_results import KINDS, kernels, results, step, train
from tests.support.command import grace_command


def run(*args, code=0):
    """Run the command at 80 columns; returns (stdout, stderr)."""
    ended, out, err = grace_command("bench", "compare", *map(str, args))
    assert ended == code, err
    assert max(map(len, out.splitlines()), default=0) <= 80
    return out, err


def verdicts(found):
    """Return the verdicts of the rows whose main figure changed, by name."""
    return {key[-1]: changes[0].verdict for key, changes in found.rows.items() if changes[0].verdict != SAME}


@pytest.fixture
def one():
    """Step times in one place."""
    return step(bandwidths=[1e9], ranks=[2])


@pytest.mark.parametrize("kind", KINDS)
def test_results_equal_themselves(kind, tmp_path):
    results(kind).save(tmp_path)
    out, err = run(tmp_path, tmp_path / "results.json", "--fail-if-slower", "0")
    rows = len(results(kind).rows)
    assert "The machine, the versions and the settings are the same." in out
    assert f"{rows} unchanged within" in out
    assert out.splitlines()[-1].startswith("0 ")
    assert "Warning" not in out
    assert err == ""


def test_the_command_shows_changes_differences_and_lonely_rows(one, tmp_path):
    one.save(tmp_path / "a")
    other = step(bandwidths=[1e9], ranks=[2], slower={"qsgd": 1.5, "cast": 0.5})
    other.rows = [row for row in other.rows if row["name"] != "onebit"]
    other.machine["cores"], other.versions["torch"], other.settings["batch"] = 8, "2.14.0", 64
    other.complete = False
    other.save(tmp_path / "b")
    out, _ = run(tmp_path / "a", tmp_path / "b")
    start = out[: out.index("2 ranks, 1 Gbit/s")]
    assert "different machines" in start
    for text in ("cores: 16 in a, 8 in b", "torch: 2.13.0 in a, 2.14.0 in b", "batch: 32 in a, 64 in b", "incomplete"):
        assert text in " ".join(start.split())
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["qsgd"][3:5] == ["1.500", "slower"]
    assert lines["cast"][3:5] == ["0.500", "faster"]
    assert lines["natural"][3] == "1.000"
    assert "only in a: onebit (torch, 2 ranks, 1 Gbit/s)" in out
    assert out.splitlines()[-1] == "1 faster, 1 slower, 14 unchanged within the quartiles."


def test_the_exit_code_tells_when_something_is_slower(tmp_path):
    step(bandwidths=[1e9]).save(tmp_path / "a")
    step(bandwidths=[1e9], slower={"qsgd": 1.5}).save(tmp_path / "b")
    _, err = run(tmp_path / "a", tmp_path / "b", "--fail-if-slower", "20", code=1)
    assert err.splitlines() == [
        f"grace bench compare: slower by 50.0 %: qsgd (torch, {ranks} ranks, 1 Gbit/s)" for ranks in (2, 4)
    ]
    run(tmp_path / "a", tmp_path / "b", "--fail-if-slower", "60")
    run(tmp_path / "b", tmp_path / "a", "--fail-if-slower", "0")
    fewer = step(bandwidths=[1e9], ranks=[2])
    fewer.rows = [row for row in fewer.rows if row["name"] != "cast"]
    next(row for row in fewer.rows if row["name"] == "qsgd")["step_ms"] = None
    fewer.save(tmp_path / "b")
    _, err = run(tmp_path / "a", tmp_path / "b", "--fail-if-slower", "20", code=1)
    lost = [line for line in err.splitlines() if "2 ranks" in line]
    assert lost == [
        f"grace bench compare: not measured in b: {name} (torch, 2 ranks, 1 Gbit/s)" for name in ("cast", "qsgd")
    ]
    run(tmp_path / "b", tmp_path / "a", "--fail-if-slower", "20")  # more rows than before are none that are missing
    assert "0 or more, not -1" in run(tmp_path / "a", tmp_path / "b", "--fail-if-slower=-1", code=2)[1]


def test_step_times_changed_where_quartiles_do_not_overlap(one):
    other = step(bandwidths=[1e9], ranks=[2])
    rows = {row["name"]: row for row in other.rows}
    before = {row["name"]: row for row in one.rows}
    for name, low in (("qsgd", 1.001), ("cast", 0.999)):
        rows[name]["step_ms"] *= 1.5
        rows[name]["step_low_ms"] = before[name]["step_high_ms"] * low
        rows[name]["step_high_ms"] *= 2
    found = compare(one, other)
    assert verdicts(found) == {"qsgd": WORSE}
    assert [key[-1] for key in found.complaints(10)] == ["qsgd"]
    assert verdicts(compare(other, one)) == {"qsgd": BETTER}


def test_quality_changed_where_spreads_do_not_overlap():
    assert verdicts(compare(train(), train(worse={"qsgd": 0.0041, "cast": 0.0039}))) == {"qsgd": WORSE}
    lower = [train(), train(worse={"qsgd": 0.0041})]
    for each in lower:
        each.settings["higher_is_better"] = False
    assert verdicts(compare(*lower)) == {"qsgd": BETTER}
    single = compare(train(), train(seeds=[0], worse={"qsgd": 0.1}))
    assert {changes[0].verdict for changes in single.rows.values()} == {UNKNOWN}
    assert "13 that cannot be judged (one seed)" in str(single)


def test_times_without_a_spread_changed_by_a_tenth():
    assert set(verdicts(compare(kernels(), kernels(slower=1.05))).values()) == set()
    found = compare(kernels(), kernels(slower=1.5))
    assert set(verdicts(found).values()) == {WORSE}
    assert "none" not in verdicts(found)  # it takes no time
    assert len(found.complaints(10)) == 36


def test_what_cannot_be_compared_is_refused(tmp_path):
    for kind in KINDS:
        results(kind).save(tmp_path / kind)
    assert "different kinds" in run(tmp_path / "step", tmp_path / "train", code=2)[1]
    assert "cannot be read" in run(tmp_path / "step", tmp_path / "nowhere", code=2)[1]
    with pytest.raises(ConfigError, match="no row in common"):
        compare(train(methods=["qsgd"]), train(methods=["none"]))


def test_unknown_values_are_no_changes(one):
    other = step(bandwidths=[1e9], ranks=[2])
    for row in other.rows:
        row["step_ms"] = None
    found = compare(one, other)
    assert {changes[0].verdict for changes in found.rows.values()} == {UNKNOWN}
    assert set(found.complaints(0).values()) == {"not measured in b"}
