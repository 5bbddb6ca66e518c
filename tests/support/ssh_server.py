"""A real ssh server on this machine, which has another name and sees empty folders: as good as a second machine."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT
from tests.support.limits import HANGS

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
