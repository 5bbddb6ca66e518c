"""Users' files become plain data, or an error that says where they are wrong."""

import pytest

from grace import ConfigError
from grace.core.documents import parse

DEFAULTS = "defaults: &defaults {type: allreduce, period: 1}\n"


def test_a_mapping_overrides_what_it_merges():
    document = parse(
        f"{DEFAULTS}outer: &outer\n  <<: *defaults\n  period: 5\nlate: {{<<: *outer, period: 9}}", "a.yaml"
    )
    assert document["outer"] == {"type": "allreduce", "period": 5}
    assert document["late"] == {"type": "allreduce", "period": 9}
    assert document["defaults"]["period"] == 1


@pytest.mark.parametrize("mapping", ["{period: 1, period: 2}", "{<<: *defaults, period: 5, period: 6}"])
def test_a_key_stands_in_a_mapping_once(mapping):
    with pytest.raises(ConfigError, match="line 2: the key 'period' stands there a second time"):
        parse(f"{DEFAULTS}outer: {mapping}", "a.yaml")
