"""Resource files: what they mean, and that whatever cannot work is refused by name."""

import json
import subprocess
import sys

import pytest
import yaml

import grace
from grace.launch.cluster import SSH, Resources
from tests.support.limits import HANGS

CLUSTER = """
nodes:
  - {address: 10.0.0.2, gpus: [0, 1], ssh_config: default}
  - {address: 10.0.0.1, chief: true, gpus: [0], cpus: [0, 1], network_bandwidth: 10}
  - {address: worker.example, cpus: [0, 1, 3], ssh_config: default}
  - {address: 10.0.0.4, ssh_config: default, network_bandwidth: 2.5}
ssh:
  default: {username: me, port: 2222, key_file: ~/.ssh/id, python_venv: /opt/venv, shared_envs: {A: x y, B: 1}}
"""


def written(folder, text, name="cluster.yaml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_ranks_are_one_per_gpu_or_cpu_or_node_and_the_chiefs_come_first(tmp_path):
    resources = Resources.load(written(tmp_path, CLUSTER))
    assert resources.world_size == 7
    assert resources.ranks == [1, 0, 0, 2, 2, 2, 3]
    assert resources.chief.address == "10.0.0.1"
    assert [node.address for node in resources.ordered] == ["10.0.0.1", "10.0.0.2", "worker.example", "10.0.0.4"]
    assert [node.network_bandwidth for node in resources.nodes] == [None, 10, None, 2.5]
    assert resources.ssh_of(resources.chief) is None
    assert resources.ssh_of(resources.nodes[0]) == SSH(
        username="me", port=2222, key_file="~/.ssh/id", python_venv="/opt/venv", shared_envs={"A": "x y", "B": "1"}
    )


@pytest.mark.parametrize("ranks", [None, 1, 3])
def test_without_a_file_it_is_this_machine(ranks):
    resources = Resources.load(None, ranks)
    assert resources.ranks == [0] * (ranks or 1)
    assert resources.chief == resources.nodes[0]
    assert resources.chief.address == "localhost"
    assert resources.chief.gpus == []


@pytest.mark.parametrize("chief", [", chief: true", ""])
def test_one_node_may_be_this_machine_and_need_not_be_called_the_chief(tmp_path, chief):
    resources = Resources.load(written(tmp_path, f"nodes: [{{address: localhost{chief}, gpus: [1, 3]}}]"))
    assert resources.ranks == [0, 0]
    assert resources.chief.address == "localhost"


@pytest.mark.parametrize("setup", ['["module load a", "conda activate b"]', '"module load a\\n\\nconda activate b\\n"'])
def test_setup_is_a_list_of_lines_or_a_text_of_lines(tmp_path, setup):
    text = f"nodes: [{{address: a, ssh_config: x}}]\nssh: {{x: {{setup: {setup}}}}}"
    assert Resources.load(written(tmp_path, text)).ssh["x"].setup == ["module load a", "conda activate b"]


@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a.yml"])
def test_what_is_written_is_read_again(tmp_path, name):
    resources = Resources.load(written(tmp_path, CLUSTER))
    document = resources.model_dump()
    text = json.dumps(document) if name == "a.json" else yaml.safe_dump(document)
    assert Resources.load(written(tmp_path, text, name)) == resources
    assert Resources.from_document(document) == resources


CHIEF = "{address: 10.0.0.1, chief: true}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"nodes: [{CHIEF}, {{address: 127.0.0.1, ssh_config: a}}]\nssh: {{a: {{}}}}",
            "node 127.0.0.1: is a loopback address, where other nodes reach only themselves; "
            "with several nodes, write the one by which the others reach it",
        ),
        ("nodes: [{address: a}, {address: b}]", "no node is the chief; give one of them `chief: true`"),
        (f"nodes: [{CHIEF}, {{address: b, chief: true}}]", "2 nodes are chiefs (10.0.0.1, b); there must be one"),
        (
            f"nodes: [{CHIEF}, {{address: b}}]\nssh: {{x: {{}}}}",
            "node b: is not the chief, so it needs ssh settings; add `ssh_config:` with a group of them; known: 'x'",
        ),
        (
            f"nodes: [{CHIEF}, {{address: b}}]",
            "node b: is not the chief, so it needs ssh settings; add `ssh_config:` "
            "with a group of them; there are none yet: add `ssh:`",
        ),
        (
            f"nodes: [{CHIEF}, {{address: b, ssh_config: y}}]\nssh: {{x: {{}}}}",
            "node b: unknown ssh group 'y'; known: 'x'",
        ),
        (
            "nodes: [{address: a, chief: true, gpus: [0, 1, 0]}]",
            "node a: gpus: device 0 is there 2 times; a device has one rank",
        ),
        (
            "nodes: [{address: a, chief: true, cpus: [2, 2]}]",
            "node a: cpus: device 2 is there 2 times; a device has one rank",
        ),
        (
            f"nodes: [{CHIEF}, {{address: 10.0.0.1, ssh_config: a}}]\nssh: {{a: {{}}}}",
            "node 10.0.0.1 is there 2 times; write all its devices in one node",
        ),
        (
            "nodes: [{address: a, chief: true, network_bandwidth: 0}]",
            "node a: network_bandwidth: must be a number of Gbit/s above 0, not 0.0",
        ),
        (
            "nodes: [{address: a, chief: true, network_bandwidth: -1.5}]",
            "node a: network_bandwidth: must be a number of Gbit/s above 0, not -1.5",
        ),
        (
            "nodes: [{address: a, chief: true, network_bandwidth: .nan}]",
            "node a: network_bandwidth: must be a number of Gbit/s above 0, not nan",
        ),
        (
            "nodes: [{address: a, chief: true, network_bandwidth: fast}]",
            "node a: network_bandwidth: must be a number, not 'fast'",
        ),
        (
            "nodes: [{address: a, cheif: true}]",
            "node a: cheif: unknown key (did you mean 'chief'?); known: address, chief, gpus, cpus, ssh_config, "
            "network_bandwidth",
        ),
        (
            "node: []\nnodes: [{address: a, chief: true}]",
            "node: unknown key (did you mean 'nodes'?); known: nodes, ssh",
        ),
        (
            f"nodes: [{CHIEF}]\nssh: {{x: {{user: me}}}}",
            "ssh: x: user: unknown key (did you mean 'username'?); "
            "known: username, port, key_file, python_venv, shared_envs, setup",
        ),
        ("nodes: [{address: a, chief: 'yes'}]", "node a: chief: must be true or false, not 'yes'"),
        ("nodes: [{address: a, chief: true, gpus: 2}]", "node a: gpus: must be a list, not 2"),
        ("nodes: [{address: a, chief: true, gpus: [x]}]", "node a: gpus: 0: must be a whole number, not 'x'"),
        ("nodes: [{address: a, chief: true, gpus: [true]}]", "node a: gpus: 0: must be a whole number, not True"),
        (
            "nodes: [{address: a, chief: true, gpus: [-1]}]",
            "node a: gpus: 0: must be greater than or equal to 0, not -1",
        ),
        ("nodes: [{chief: true}]", "nodes: number 1: address: is missing"),
        ("nodes: [{address: 1.5, chief: true}]", "nodes: number 1: address: must be text, not 1.5"),
        (
            "nodes: [{address: 'fe80::1', chief: true}]",
            "nodes: number 1: address: must be a host name or an IPv4 address, as in 10.0.0.1, not 'fe80::1'",
        ),
        (
            "nodes: [{address: '-oProxyCommand=x', chief: true}]",
            "nodes: number 1: address: must be a host name or an IPv4 address, as in 10.0.0.1, not '-oProxyCommand=x'",
        ),
        ("nodes: [a]", "nodes: number 1: must be keys with values, not 'a'"),
        ("nodes: []", "nodes: must not be empty"),
        ("nodes:", "nodes: must be a list, not None"),
        ("ssh: {}", "nodes: is missing"),
        ("ssh: []\nnodes: 3", "nodes: must be a list, not 3 (and 1 more error)"),
        (
            f"nodes: [{CHIEF}]\nssh: {{x: {{port: 65536}}}}",
            "ssh: x: port: must be less than or equal to 65535, not 65536",
        ),
        (
            f"nodes: [{CHIEF}]\nssh: {{x: {{username: '-l root'}}}}",
            "ssh: x: username: must be a user's name, not '-l root'",
        ),
        (f"nodes: [{CHIEF}]\nssh: {{x: {{key_file: ''}}}}", "ssh: x: key_file: must be a path, not ''"),
        (
            f"nodes: [{CHIEF}]\nssh: {{x: {{shared_envs: {{A B: c}}}}}}",
            "ssh: x: shared_envs: must be names of environment variables to values, not 'A B'",
        ),
        (
            f"nodes: [{CHIEF}]\nssh: {{x: {{shared_envs: {{A: true}}}}}}",
            "ssh: x: shared_envs: A: must be text, not a value of type bool",  # which may be a secret
        ),
        (
            f"nodes: [{CHIEF}]\nssh: {{x: {{shared_envs: TOKEN=secret}}}}",
            "ssh: x: shared_envs: must be keys with values, not a value of type str",
        ),
        (f"nodes: [{CHIEF}]\nssh: {{x: {{setup: [1]}}}}", "ssh: x: setup: 0: must be text, not 1"),
        (f"nodes: [{CHIEF}]\nssh: {{x: {{setup: ['']}}}}", "ssh: x: setup: must be lines for a shell, not ''"),
        (
            f"nodes: [{{address: a, gpus: [{2**64}]}}]",
            f"node a: gpus: 0: must be less than or equal to 65535, not {2**64}",
        ),
        ("- a", "must have the keys nodes and ssh, not be ['a']"),
        ("", "must have the keys nodes and ssh, not be None"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_what_would_be_right(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(grace.ConfigError) as error:
        Resources.load(path)
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "nodes: [", "is not YAML: while parsing a flow node"),
        ("a.yaml", "ssh: {}\nnodes: [secret", "is not YAML: while parsing a flow sequence"),
        ("a.yaml", "nodes: !!python/object:os.system x", "is not YAML: could not determine a constructor"),
        ("a.yaml", "a: !!timestamp x", "is not YAML: "),
        ("a.yaml", "[" * 10_000, "is not YAML: "),
        ("a.json", "{'nodes': 1}", "is not JSON: Expecting property name"),
        ("a.yaml", b"\xff\xfe\xff", "is not UTF-8 text"),
        ("a.toml", "", "must be a .yaml, .yml or .json file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, text, message):
    path = written(tmp_path, text, name)
    with pytest.raises(grace.ConfigError) as error:
        Resources.load(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
    assert "secret" not in str(error.value)  # the place is named, and the line is not quoted


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(grace.ConfigError, match=r"nowhere\.yaml: cannot be read: No such file or directory"):
        Resources.load(tmp_path / "nowhere.yaml")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(grace.ConfigError, match=r"folder\.json: cannot be read: Is a directory"):
        Resources.load(tmp_path / "folder.json")


def test_numbers_of_ranks_are_checked(tmp_path):
    with pytest.raises(grace.ConfigError, match="ranks must be between 1 and 65535, not 0"):
        Resources.load(None, ranks=0)
    with pytest.raises(grace.ConfigError, match="says how many ranks there are"):
        Resources.load(written(tmp_path, CLUSTER), ranks=2)


@pytest.mark.ranks
def test_grace_does_not_load_pydantic_and_without_it_the_line_that_installs_it_is_said():
    script = """
import sys, grace, grace.strategy
print("pydantic" in sys.modules)
for package in ("yaml", "pydantic"):
    sys.modules[package] = None
    try:
        import grace.launch.cluster
    except grace.MissingExtraError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=HANGS)
    line = 'is not installed; install it with: pip install "grace-compress[strategy]"'
    assert done.stdout.splitlines() == ["False", f"pyyaml {line}", f"pydantic {line}"], done.stderr


def test_numbers_that_python_does_not_print_are_refused(tmp_path):
    huge = "0x" + "f" * 5000
    for text in (f"{huge}: 1", f"nodes: {huge}", f"nodes: [{{address: a, gpus: [{huge}]}}]", f"ssh: {{{huge}: 1}}"):
        with pytest.raises(grace.ConfigError):
            Resources.load(written(tmp_path, text))


def test_documents_that_contain_themselves_or_grow_are_refused(tmp_path):
    for text in ("&a {nodes: *a}", "&a [*a]", "nodes: &a [*a]", "nodes: [{address: a, gpus: &g [*g]}]"):
        with pytest.raises(grace.ConfigError):
            Resources.load(written(tmp_path, text))
    levels = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 12))
    with pytest.raises(grace.ConfigError):
        Resources.load(written(tmp_path, f"x0: &x0 [1]\n{levels}nodes: *x11"))
