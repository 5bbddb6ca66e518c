"""Values of ``shared_envs`` reach the ranks, and stand in no command line; test_ssh.py has them over a real ssh."""

import contextlib
import re
import shlex
import stat
import subprocess

import pytest
import yaml

from grace.launch import supervisor
from grace.launch.cluster import Resources
from grace.launch.command_lines import Command, command

SECRETS = """
nodes: [{address: a, chief: true}, {address: b, ssh_config: x}, {address: c, ssh_config: x}]
ssh: {x: {setup: ['true'], shared_envs: {TOKEN: plain secret, HELD: $HELD/expanded}}}
"""


@pytest.mark.parametrize("engine", ["torch", "horovod", "mpi"])
def test_values_of_shared_envs_stand_in_no_command_line(engine):
    commands = command(Resources.from_document(yaml.safe_load(SECRETS)), engine, ["python", "a.py"])
    for each in commands:
        for shown in (str(each), *each.argv, *each.env_sender):
            assert "secret" not in shown
            assert "expanded" not in shown
    assert all(each.environment["TOKEN"] == "plain secret" for each in commands if not each.remote)
    over_ssh = [each for each in commands if each.remote]
    assert all(each.env_exports == """export TOKEN='plain secret' HELD="${HELD}"/expanded""" for each in over_ssh)
    files = [re.search(r"~/\.grace-\w{32}", each.argv[-1])[0] for each in over_ssh]
    assert len(set(files)) == len(files) == (2 if engine == "torch" else 0)  # homes may be one, on a file server
    assert all(file in each.env_sender[-1] for file, each in zip(files, over_ssh, strict=True))


HOMELY = """
nodes: [{{address: 10.0.0.1, chief: true}}, {{address: 10.0.0.2, ssh_config: x}}]
ssh: {{x: {{python_venv: {home}/venv, {more}}}}}
"""


@pytest.mark.parametrize("more", ["setup: ['true']", "shared_envs: {A: '$HOME/lib'}", "shared_envs: {A: b}"])
def test_a_folder_of_python_comes_before_what_a_nodes_bashrc_puts_first(tmp_path, more):
    """Bash reads that file whenever sshd has started it, and once more in a bash -c that it becomes."""
    for folder in ("venv/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python").write_text(f"#!/bin/sh\necho {folder}\n")
        (tmp_path / folder / "python").chmod(0o755)
    (tmp_path / "venv/bin/activate").write_text(f'PATH="{tmp_path}/venv/bin:$PATH"\n')
    (tmp_path / ".bashrc").write_text(f'PATH="{tmp_path}/other:$PATH"\n')
    resources = Resources.from_document(yaml.safe_load(HOMELY.format(home=tmp_path, more=more)))
    over_ssh = command(resources, "torch", ["python", "a.py"])[1]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "SSH_CLIENT": "1 2 3", "SSH2_CLIENT": "1 2 3"}
    with on_node(over_ssh.env_sender[-1:], over_ssh.env_exports, environment):
        line = ["bash", "-c", over_ssh.argv[-1]]
        done = subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        line[-1] = shlex.split(str(over_ssh), comments=True)[-1]
        shown = subprocess.run(line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (shown.stdout, shown.stderr) == ("venv/bin\n", "")
    assert not list(tmp_path.glob(".grace-*"))


@contextlib.contextmanager
def on_node(env_sender, env_exports, environment):
    """The file that is handed over, if there is one, while the block runs."""
    if not env_sender:
        yield
        return
    line = ["bash", "-c", *env_sender]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        process.stdin.write(env_exports)
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield


def test_a_file_that_is_handed_over_is_its_owners_and_is_removed_unread(tmp_path):
    over_ssh = command(Resources.from_document(yaml.safe_load(SECRETS)), "torch", ["python", "a.py"])[1]
    with on_node(over_ssh.env_sender[-1:], over_ssh.env_exports, {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}):
        (file,) = tmp_path.glob(".grace-*")
        assert file.read_text() == over_ssh.env_exports
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not file.exists()


def test_a_node_whose_shell_ends_at_once_is_a_failure_and_nothing_is_started_there(tmp_path):
    started = tmp_path / "started"
    over_ssh = Command("b", ["touch", str(started)], remote=True, env_sender=["true"], env_exports="export A=1\n")
    end = supervisor.run([over_ssh])
    assert end.code == 1
    assert end.message.startswith("node b: its shell ended before it had the variables of shared_envs")
    assert not started.exists()
