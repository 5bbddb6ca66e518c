"""Copies of files on the other nodes before ranks start there: by rsync where both sides have it, else by scp."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grace.errors import ConfigError
from grace.launch.command_lines import Command, host, ssh_options

if TYPE_CHECKING:
    from grace.launch.cluster import SSH, Node, Resources


def commands(resources: "Resources", files: Sequence[Path | str], rsync: bool | None = None) -> list[Command]:
    """Return the command lines that put files and folders under the same absolute paths on all nodes but the chief.

    Args:
        resources: the cluster; its chief is this machine.
        files: files and folders; a folder is copied with its content.
        rsync: True to copy by rsync; by default if it is installed here.

    Raises:
        ConfigError: a file does not exist.

    >>> from grace.launch.cluster import Resources
    >>> nodes = [{"address": "a", "chief": True}, {"address": "b", "ssh_config": "x"}]
    >>> document = {"nodes": nodes, "ssh": {"x": {}}}
    >>> for line in commands(Resources.from_document(document), ["/etc/hosts"], rsync=False):
    ...     print(line)
    ssh -o BatchMode=yes -p 22 b 'mkdir -p -- /etc && { rsync --version >/dev/null 2>&1 || echo no rsync; }'
    scp -q -r -p -o BatchMode=yes -P 22 /etc/hosts b:/etc/
    """
    return [
        line for node in resources.ordered if not node.chief for line in _commands_for(resources, node, files, rsync)
    ]


def copy(resources: "Resources", files: Sequence[Path | str]) -> None:
    """Put files on all nodes but the chief, one node after the other. A ConfigError says which file does not exist, or
    which node does not take it, and why."""
    for node in resources.ordered:
        if not node.chief and files:
            make, *copies = _commands_for(resources, node, files)
            output = _run(make).splitlines()
            if "no rsync" in output and copies[0].argv[0] == "rsync":
                copies = _commands_for(resources, node, files, rsync=False)[1:]
            for line in copies:
                _run(line)


def _commands_for(
    resources: "Resources", node: "Node", files: Sequence[Path | str], rsync: bool | None = None
) -> list[Command]:
    ssh = resources.ssh_of(node)
    assert ssh is not None
    folders: dict[str, list[str]] = {}
    for file in files:
        path = os.path.abspath(file)
        if not os.path.exists(path):
            raise ConfigError(f"cannot copy {file} to the nodes: there is no such file in {os.getcwd()}")
        folders.setdefault(os.path.dirname(path), []).append(path)
    if not files:
        return []
    make = f"mkdir -p -- {shlex.join(folders)} && {{ rsync --version >/dev/null 2>&1 || echo no rsync; }}"
    lines = [["ssh", *ssh_options(ssh), host(node, ssh), make]]
    for folder, paths in folders.items():
        lines.append(
            _copy_command(node, ssh, folder, paths, shutil.which("rsync") is not None if rsync is None else rsync)
        )
    return [Command(node.address, line) for line in lines]


def _copy_command(node: "Node", ssh: "SSH", folder: str, paths: list[str], rsync: bool) -> list[str]:
    target = f"{host(node, ssh)}:{folder.rstrip('/')}/"
    if rsync:
        return ["rsync", "-a", "-s", "-e", shlex.join(["ssh", *ssh_options(ssh)]), *paths, target]
    if shlex.quote(folder) != folder:  # old versions of scp let the node's shell read the folder, and new ones do not
        raise ConfigError(f"scp may not find the folder {folder!r} on node {node.address}; install rsync on both sides")
    return ["scp", "-q", "-r", "-p", *("-P" if word == "-p" else word for word in ssh_options(ssh)), *paths, target]


def _run(line: Command) -> str:
    try:
        done = subprocess.run(line.argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:
        raise ConfigError(f"cannot start {line.argv[0]}: {error.strerror}; is it installed?") from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        why = output[0] if output else f"{line.argv[0]} ended with exit code {done.returncode}"
        raise ConfigError(f"cannot copy to node {line.node}: {why}")
    return done.stdout
