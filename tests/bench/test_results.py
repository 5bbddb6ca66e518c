"""The files that benchmarks leave."""

import csv
import io
import json

import pytest

from grace.bench.common import results as record
from grace.bench.common.results import Results
from grace.errors import ConfigError

WHOLE = """{"grace_bench": 1, "kind": "step", "settings": %s, "rows": %s, "command": "", "complete": true, "when": "",
"seconds": 1.0, "machine": {}, "versions": {}}"""


@pytest.fixture
def results():
    """Two rows, of which one has a list and one a value more."""
    rows = [{"step_ms": 1.5, "times_ms": [1, 2]}, {"pays": None, "n": 3}]
    methods = ("none", "topk, coded")
    rows = [{"tensor": "gaussian", "method": method, **row} for method, row in zip(methods, rows, strict=True)]
    return Results("kernels", {"elements": 4096}, rows, command="grace bench kernels")


def test_what_is_saved_is_what_is_loaded(results, tmp_path):
    files = results.save(tmp_path / "new" / "folder")
    assert [path.name for path in files] == ["results.json", "results.csv"]
    assert record.load(files[0]) == record.load(files[0].parent) == results
    assert sorted(path.name for path in files[0].parent.iterdir()) == ["results.csv", "results.json"]


def test_it_tells_where_and_with_what(results):
    assert results.machine["cores"] >= 1
    assert results.machine["processor"]
    assert {"python", "grace", "numpy"} <= set(results.versions)
    assert results.when.endswith("Z")


def test_csv_has_the_plain_values_of_all_rows(results):
    first, second = csv.DictReader(io.StringIO(results.csv()))
    both = {"kind": "kernels", "tensor": "gaussian"}
    assert first == {**both, "method": "none", "step_ms": "1.5", "pays": "", "n": ""}
    assert second == {**both, "method": "topk, coded", "step_ms": "", "pays": "", "n": "3"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "was not written by grace bench"),
        ('{"rows": []}', "was not written by grace bench"),
        ('{"grace_bench": 99}', "another format"),
        ('{"grace_bench": 1, "kind": "step"}', "is damaged"),
        (WHOLE % ("[]", "[]"), "is damaged"),
        (WHOLE % ("{}", "[3]"), "is damaged"),
        (
            WHOLE % ("{}", '[{"name": "none", "ranks": [2]}]'),
            "row 1 of the step results has no engine, ranks, bandwidth",
        ),
    ],
)
def test_what_is_no_such_file_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        record.load(path)
    assert str(path) in str(caught.value)


def test_a_file_without_rows_is_whole(tmp_path):
    (tmp_path / "results.json").write_text(WHOLE % ("{}", "[]"))
    assert record.load(tmp_path).rows == []


def test_an_unknown_kind_is_damage(results, tmp_path):
    path, _ = results.save(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "coffee"}))
    with pytest.raises(ConfigError, match="kind of kernels, step, train"):
        record.load(path)


def test_a_folder_that_cannot_be_written_is_named(results, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        results.save(tmp_path / "file" / "below")
