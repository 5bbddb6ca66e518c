"""``grace launch`` over a real sshd on this machine, which has another name there, and sees an empty working folder: as
good as a second machine."""

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import grace
from tests.support import warm
from tests.support.engine_pools import environment
from tests.support.limits import HANGS, gone, until

ROOT = Path(grace.__file__).parents[1]
SCRIPT = """
import json, os, pathlib, platform
import grace, helper.words, torch
grace.init()
layer = torch.nn.Linear(3, 2)
opt = grace.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer, strategy="ps_load_balancing")
to = [plan.parts[0].sync.destination for plan in opt.strategy.plans]
layer(torch.ones(1, 3)).sum().backward()
opt.step()
said = {key: os.environ.get(key) for key in ("LIBRARIES", "PRICE", "TOKEN", "MODULE", "ENTERED", "HOME")}
seen = [str(file) for file in pathlib.Path.home().glob(".grace-*") if platform.node() == "other"]
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        line = file.read_bytes().decode(errors="replace")
    except OSError:
        continue
    if os.environ["TOKEN"].split()[-1] in line:
        seen.append(line)
words = json.dumps([platform.node(), helper.words.SAID, to, said, seen])
print(f"rank {grace.rank()} of {grace.size()} {words} is there\\n", end="")  # in one piece: torchrun runs python -u
"""
SECRET = secrets.token_hex(8)
SETTINGS = {
    "setup": '["export MODULE=loaded", "export ENTERED=$MODULE"]',
    "shared_envs": f'{{LIBRARIES: "$LIBRARIES:/{SECRET}", PRICE: 5$$, TOKEN: "it\'s {SECRET}"}}',
}


SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


class Machine(NamedTuple):
    """The other machine.

    Attributes:
        address: by which ssh reaches it.
        port: its server's.
        key_file: lets one in.
        path: PATH with an ssh that knows the address and the server's own key, and looks at no other settings.
    """

    address: str
    port: int
    key_file: Path
    path: str


def why_not() -> str:
    """Why there can be none here; empty if there can."""
    if SSHD is None or shutil.which("ssh") is None:
        return "OpenSSH's server or client is not installed (tools/programs.sh installs them)"
    if os.geteuid() != 0:
        return "a machine of its own name and folders (unshare) is for root only"
    tried = subprocess.run(["unshare", "-m", "-u", "true"], capture_output=True, text=True)
    return f"unshare: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def other_machine(folder: Path, empty: Path, name: str = "other", without: str = "") -> Iterator[Machine]:
    """A server while the block runs.

    Args:
        folder: for keys and settings; one's home there.
        empty: the folder that is another, empty one there; ``folder`` is there too, if it lies elsewhere.
        name: of the machine.
        without: a program that is not installed there.
    """
    if reason := why_not():
        pytest.skip(reason)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'authorized'}\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nSubsystem sftp internal-sftp\n"
        f"SetEnv PYTHONPATH={ROOT} LIBRARIES=/its/own HOME={folder}\n"
    )
    known = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {known}[{name}]:{port} {known}")
    (folder / "ssh_config").write_text(
        f"Host {name}\n HostName 127.0.0.1\n HostKeyAlias [{name}]:{port}\nHost *\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {folder / 'known'}\n GlobalKnownHostsFile /dev/null\n"
    )
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder / "ssh_config"} "$@"\n')
    (programs / "scp").write_text(f'#!/bin/sh\nexec {shutil.which("scp")} -S {programs / "ssh"} "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    hidden = f"mount --bind /dev/null {shutil.which(without)} && " if without and shutil.which(without) else ""
    script = f"hostname {name} && mount -t tmpfs none {empty} && {hidden}exec {SSHD} -D -e -f {folder / 'sshd_config'}"
    with open(folder / "sshd.log", "w") as log:
        server = subprocess.Popen(["unshare", "-m", "-u", "sh", "-c", script], stderr=log, stdout=log)
    try:
        _listens(server, port, folder / "sshd.log")
        path = f"{programs}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        yield Machine(name, port, folder / "user", path)
    finally:
        server.terminate()
        server.wait()


def _listens(server: subprocess.Popen, port: int, log: Path) -> None:
    until = time.monotonic() + HANGS
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"sshd does not listen: {log.read_text()}")


@pytest.fixture
def work(tmp_path):
    """The working folder: a program, and a module of a folder."""
    (tmp_path / "work" / "helper").mkdir(parents=True)
    (tmp_path / "work" / "train.py").write_text(SCRIPT)
    (tmp_path / "work" / "helper" / "words.py").write_text("SAID = 'copied'\n")
    (tmp_path / "server").mkdir()
    return tmp_path / "work"


def cluster(machine, folder, **settings):
    """The file, with a chief of this machine's name."""
    here = socket.gethostname()
    try:
        socket.gethostbyname(here)
    except OSError:
        pytest.skip("this machine's name has no address")
    lines = [f"  x: {{port: {machine.port}, key_file: {machine.key_file}", *(f"{k}: {v}" for k, v in settings.items())]
    (folder / "c.yaml").write_text(
        f"nodes: [{{address: {here}, chief: true, network_bandwidth: 1}}, "
        f"{{address: {machine.address}, ssh_config: x, network_bandwidth: 99}}]\n"
        f"ssh:\n{', '.join(lines)}}}\n"
    )
    with socket.socket() as free:
        free.bind(("", 0))
        return ["-r", "c.yaml", "--engine", "torch", "--port", str(free.getsockname()[1])]


def env(machine):
    return {**environment(), "PATH": machine.path, "PYTHONPATH": str(ROOT), "LIBRARIES": "/here", "COLUMNS": "80"}


def launch(machine, folder, *args):
    return subprocess.run(
        [sys.executable, "-m", "grace.cli.main", "launch", *args, "--", "python", "train.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=env(machine),
        timeout=HANGS,
    )


def enters(folder):
    """An environment's script, as AutoDist's files name it."""
    lines = f"export PATH={Path(warm.REAL).parent}:$PATH ENTERED=$ENTERED,entered\n[[ -n $BASH_VERSION ]]\n"
    (folder / "activate").write_text(lines)
    return f"source {folder / 'activate'}"


@pytest.mark.ranks
@pytest.mark.slow
def test_a_node_gets_files_runs_its_lines_and_expands_variables(tmp_path, work):
    with other_machine(tmp_path / "server", empty=work) as machine:
        args = cluster(machine, work, python_venv=f'"{enters(tmp_path)}"', **SETTINGS)
        done = launch(machine, work, *args, "--copy", "train.py", "--copy", "helper")
    assert done.returncode == 0, done.stdout + done.stderr
    told = dict(re.findall(r"rank (\d) of 2 (.*) is there", done.stdout))
    both = {"PRICE": "5$", "TOKEN": f"it's {SECRET}"}
    here = {**both, "LIBRARIES": f"/here:/{SECRET}", "MODULE": None, "ENTERED": None, "HOME": os.environ.get("HOME")}
    there = {**both, "LIBRARIES": f"/its/own:/{SECRET}", "MODULE": "loaded", "ENTERED": "loaded,entered"}
    there["HOME"] = str(tmp_path / "server")
    assert json.loads(told["0"]) == [platform.node(), "copied", [1, 1], here, []]
    assert json.loads(told["1"]) == ["other", "copied", [1, 1], there, []]


@pytest.mark.ranks
def test_scp_copies_where_rsync_is_missing_and_a_line_that_fails_is_named(tmp_path, work):
    with other_machine(tmp_path / "server", empty=work, without="rsync") as machine:
        args = cluster(machine, work, setup="[module load cuda/99]")
        done = launch(machine, work, *args, "--copy", "helper")
        target = ["-p", str(machine.port), "-i", str(machine.key_file), "other"]
        read = [tmp_path / "server" / "bin" / "ssh", *target, f"cat {work}/helper/words.py; ls {work}"]
        there = subprocess.run(read, capture_output=True, text=True).stdout
    said = "grace launch: on other this failed before the program began: module load cuda/99"
    assert done.stderr.splitlines()[-1] == said, done.stdout + done.stderr
    assert done.returncode == 1
    assert there == "SAID = 'copied'\nhelper\n"


@pytest.mark.ranks
def test_a_folder_that_a_node_lacks_and_a_key_that_is_not_known_are_named(tmp_path, work):
    (work / "sub").mkdir()
    (work / "sub" / "train.py").write_text("")
    with other_machine(tmp_path / "server", empty=work) as machine:
        args = cluster(machine, work / "sub", shared_envs=SETTINGS["shared_envs"])
        lacking = launch(machine, work / "sub", *args)
        until(lambda: not list((tmp_path / "server").glob(".grace-*")))  # it was handed over, and not read
        (tmp_path / "server" / "known").write_text("")
        unknown = launch(machine, work / "sub", *args)
        copied = launch(machine, work / "sub", *args, "--copy", ".")
    last = lacking.stderr.splitlines()[-1]
    assert last.startswith("grace launch: node other lacks the working folder or a part of it ("), lacking
    assert last.endswith("); grace launch --copy puts files on the nodes")
    assert "host key" in unknown.stderr.splitlines()[-1], unknown
    assert copied.returncode == 2
    assert copied.stderr.startswith("grace: cannot copy to node other: "), copied


@pytest.mark.ranks
@pytest.mark.slow
def test_ending_the_command_ends_the_ranks_on_the_node(tmp_path, work):
    begun = [tmp_path / "0", tmp_path / "1"]
    rank = f"import os, time; open(f'{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.getpid())); time.sleep(300)"
    with other_machine(tmp_path / "server", empty=work) as machine:
        args = cluster(machine, work, python_venv=f'"{enters(tmp_path)}"')
        program = [warm.REAL, "-m", "grace.cli.main", "launch", *args, "--", "python", "-S", "-c", rank]
        command = subprocess.Popen(program, cwd=work, env=env(machine), stderr=subprocess.PIPE)
        until(lambda: all(file.exists() and file.read_text() for file in begun))
        ranks = [file.read_text() for file in begun]
        assert not any(map(gone, ranks))
        command.terminate()
        assert command.wait(HANGS) == 130
        until(lambda: gone(*ranks))
        command.stderr.close()
