"""Machines of a run: a file that names nodes, their devices and how to reach them.

::

    nodes:
      - {address: 10.0.0.1, chief: true, gpus: [0, 1], cpus: [0], network_bandwidth: 10}     # Gbit/s
      - {address: 10.0.0.2, gpus: [0, 1], ssh_config: default}
    ssh: {default: {username: me, port: 22, key_file: ~/.ssh/id, python_venv: ~/venv, shared_envs: {NCCL_DEBUG: INFO}}}
"""

import collections
import ipaddress
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from grace.core import documents, schema_words
from grace.core.documents import shown
from grace.errors import ConfigError, missing_extra

try:
    import pydantic
except ImportError:
    raise missing_extra("pydantic", "strategy") from None

try:
    import yaml  # noqa: F401
except ImportError:
    raise missing_extra("pyyaml", "strategy") from None

HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Host names and IPv4 addresses: launchers write ``host:slots``, so they may not contain a colon."""
WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

LAST_DEVICE = 65535


def _matching(pattern: re.Pattern[str], right: str, text: str) -> str:
    if not pattern.fullmatch(text):
        raise ValueError(f"must be {right}, not {shown(text)}")
    return text


Host = Annotated[
    str, pydantic.AfterValidator(partial(_matching, HOST, "a host name or an IPv4 address, as in 10.0.0.1"))
]
User = Annotated[str, pydantic.AfterValidator(partial(_matching, WORD, "a user's name"))]
Device = Annotated[int, pydantic.Field(ge=0, le=LAST_DEVICE)]
Port = Annotated[int, pydantic.Field(ge=1, le=65535)]


class _Part(pydantic.BaseModel):
    """Base of the file's parts: no keys but the fields, and values of the fields' types without conversion."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        return schema_words.check_unknown_keys(cls, value)


class Node(_Part):
    """Machine of a run.

    Attributes:
        address: its host name or IPv4 address, as the other nodes reach it.
        chief: True for the machine on which the launcher runs, and which has rank 0.
        gpus: the numbers of its GPUs, one rank each.
        cpus: the numbers of its CPUs; one rank each where there are no GPUs.
        ssh_config: the group of ssh settings by which the chief reaches it.
        network_bandwidth: Gbit/s.
    """

    address: Host
    chief: bool = False
    gpus: list[Device] = []
    cpus: list[Device] = []
    ssh_config: str | None = None
    network_bandwidth: float | None = None

    @property
    def slots(self) -> int:
        """Number of the node's ranks: one per GPU, or else per CPU, or else one.

        >>> Node(address="a", gpus=[0, 1], cpus=[0]).slots, Node(address="a", cpus=[2]).slots, Node(address="a").slots
        (2, 1, 1)
        """
        return len(self.gpus) or len(self.cpus) or 1

    @pydantic.field_validator("gpus", "cpus")
    @classmethod
    def _distinct(cls, devices: list[int]) -> list[int]:
        for device, count in collections.Counter(devices).items():
            if count > 1:
                raise ValueError(f"device {shown(device)} is there {count} times; a device has one rank")
        return devices

    @pydantic.field_validator("network_bandwidth")
    @classmethod
    def _positive(cls, bandwidth: float | None) -> float | None:
        if bandwidth is not None and not 0 < bandwidth < float("inf"):
            raise ValueError(f"must be a number of Gbit/s above 0, not {shown(bandwidth)}")
        return bandwidth


class SSH(_Part):
    """Settings by which nodes are reached.

    Attributes:
        username: the user's name on the nodes; by default ssh's choice.
        port: the ssh server's port.
        key_file: the private key's file, on the chief.
        python_venv: a virtual environment's folder, on the nodes; or the command that enters an environment, which
            bash runs there (``source ~/venv/bin/activate``, ``source .../conda.sh; conda activate x``).
        shared_envs: environment variables of the ranks; $NAME and ${NAME} are expanded on each node, $$ is a dollar.
        setup: lines that bash runs on the nodes first (``module load cuda``); one that fails ends the job.
    """

    username: User | None = None
    port: Port = 22
    key_file: str | None = None
    python_venv: str | None = None
    shared_envs: dict[str, str] = {}
    setup: list[str] = []

    @pydantic.field_validator("key_file", "python_venv")
    @classmethod
    def _path(cls, path: str | None) -> str | None:
        if path is not None and (not path or path.startswith("-") or any(ord(character) < 32 for character in path)):
            raise ValueError(f"must be a path, not {shown(path)}")
        return path

    @pydantic.field_validator("setup", mode="before")
    @classmethod
    def _text_as_lines(cls, setup: Any) -> Any:
        return [line for line in setup.splitlines() if line.strip()] if isinstance(setup, str) else setup

    @pydantic.field_validator("setup")
    @classmethod
    def _lines(cls, setup: list[str]) -> list[str]:
        for line in setup:
            if "\0" in line or not line.strip():
                raise ValueError(f"must be lines for a shell, not {shown(line)}")
        return setup

    @pydantic.field_validator("shared_envs", mode="before")
    @classmethod
    def _numbers_as_text(cls, variables: Any) -> Any:
        if not isinstance(variables, dict):
            return variables
        return {k: str(v) if type(v) is int and abs(v) < 2**64 else v for k, v in variables.items()}

    @pydantic.field_validator("shared_envs")
    @classmethod
    def _variables(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            _matching(VARIABLE, "names of environment variables to values", name)
            if "\0" in value:
                raise ValueError(f"the value of {name} has a zero byte")
        return variables


class Resources(_Part):
    """Nodes of a run.

    Attributes:
        nodes: the machines; exactly one is the chief, and a single one always is.
        ssh: groups of ssh settings by name.
    """

    nodes: Annotated[list[Node], pydantic.Field(min_length=1)]
    ssh: dict[str, SSH] = {}

    @classmethod
    def load(cls, path: Path | str | None, ranks: int | None = None) -> "Resources":
        """Read a file: YAML (.yaml, .yml) or JSON (.json).

        Args:
            path: the file; None stands for this machine alone.
            ranks: number of ranks of this machine when there is no file; by default one.

        Raises:
            ConfigError: the file cannot be read, or describes nodes that cannot work together.

        >>> Resources.load(None, ranks=2).world_size
        2
        """
        if path is None:
            if ranks is not None and not 1 <= ranks <= LAST_DEVICE:
                raise ConfigError(f"ranks must be between 1 and {LAST_DEVICE}, not {ranks}")
            return cls(nodes=[Node(address="localhost", chief=True, cpus=list(range(ranks or 1)))])
        if ranks is not None:
            raise ConfigError(f"{path} says how many ranks there are; a number of ranks is for runs without a file")
        return cls.from_document(_read(Path(path)), str(path))

    @classmethod
    def from_document(cls, document: Any, source: str = "resources") -> "Resources":
        """Make resources from the content of a file.

        Args:
            document: dictionaries and lists, as YAML gives them.
            source: the beginning of the errors' messages.

        Raises:
            ConfigError: a key, a type or a combination cannot work.

        >>> Resources.from_document({"nodes": [{"address": "10.0.0.1", "gpus": [0, 1]}]}).world_size
        2
        >>> Resources.from_document({"nodes": [{"address": "10.0.0.1"}, {"address": "10.0.0.2"}]})
        Traceback (most recent call last):
        grace.errors.ConfigError: resources: no node is the chief; give one of them `chief: true`
        """
        if not isinstance(document, dict):
            raise ConfigError(f"{source}: must have the keys nodes and ssh, not be {shown(document)}")
        try:
            return cls.model_validate(document)
        except pydantic.ValidationError as error:
            raise ConfigError(f"{source}: {_format_error(error, document)}") from None
        except RecursionError:
            raise ConfigError(f"{source}: is nested too deeply") from None

    @property
    def chief(self) -> Node:
        """Node on which the launcher runs."""
        return next(node for node in self.nodes if node.chief)

    @property
    def ordered(self) -> list[Node]:
        """Chief and then the other nodes as declared: the order of ranks."""
        return sorted(self.nodes, key=lambda node: not node.chief)

    @property
    def ranks(self) -> list[int]:
        """For each rank, the index of its node in ``nodes``; the chief's ranks are the first.

        >>> Resources.load(None, ranks=3).ranks
        [0, 0, 0]
        """
        order = sorted(range(len(self.nodes)), key=lambda index: not self.nodes[index].chief)
        return [index for index in order for _ in range(self.nodes[index].slots)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(node.slots for node in self.nodes)

    def ssh_of(self, node: Node) -> SSH | None:
        """Return the ssh settings of a node, if it has any."""
        return None if node.ssh_config is None else self.ssh[node.ssh_config]

    @pydantic.field_validator("nodes")
    @classmethod
    def _single_is_chief(cls, nodes: list[Node]) -> list[Node]:
        return [nodes[0].model_copy(update={"chief": True})] if len(nodes) == 1 else nodes

    @pydantic.model_validator(mode="after")
    def _work_together(self) -> "Resources":
        addresses = [node.address for node in self.nodes]
        for address, count in collections.Counter(addresses).items():
            if count > 1:
                raise ValueError(f"node {address} is there {count} times; write all its devices in one node")
        if len(self.nodes) > 1:
            for address in filter(_is_loopback, addresses):
                raise ValueError(
                    f"node {address}: is a loopback address, where other nodes reach only themselves; "
                    "with several nodes, write the one by which the others reach it"
                )
        chiefs = [node.address for node in self.nodes if node.chief]
        if not chiefs:
            raise ValueError("no node is the chief; give one of them `chief: true`")
        if len(chiefs) > 1:
            raise ValueError(f"{len(chiefs)} nodes are chiefs ({', '.join(chiefs)}); there must be one")
        for node in self.nodes:
            if node.ssh_config is None and not node.chief:
                needs = "is not the chief, so it needs ssh settings; add `ssh_config:` with a group of them"
                raise ValueError(f"node {node.address}: {needs}{self._known_groups()}")
            if node.ssh_config is not None and node.ssh_config not in self.ssh:
                raise ValueError(
                    f"node {node.address}: unknown ssh group {shown(node.ssh_config)}{self._known_groups()}"
                )
        return self

    def _known_groups(self) -> str:
        return f"; known: {', '.join(map(shown, self.ssh))}" if self.ssh else "; there are none yet: add `ssh:`"


def _read(path: Path) -> Any:
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ConfigError(f"{path}: must be a .yaml, .yml or .json file")
    return documents.parse(documents.read(path), str(path))


def _is_loopback(address: str) -> bool:
    """Return True if an address means "this machine" everywhere.

    >>> _is_loopback("localhost"), _is_loopback("127.0.0.2"), _is_loopback("0.0.0.0"), _is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        # a host name
        return address.lower().rstrip(".").split(".")[-1] in ("localhost", "localdomain")
    return number.is_loopback or number.is_unspecified


# -- messages -------------------------------------------------------------------------------------------------------


def _format_error(error: pydantic.ValidationError, document: dict) -> str:
    """Return the first error, by the names that the file has, and the number of others."""
    errors = error.errors(include_url=False)
    where = schema_words.location(errors[0])
    parts = [_format_location(where, document)] if where else []
    # values of shared_envs may be secrets
    message = schema_words.in_words(errors[0], hidden="shared_envs" in where)
    others = len(errors) - 1
    more = f" (and {others} more {'error' if others == 1 else 'errors'})" if others else ""
    return ": ".join([*parts, message]) + more


def _format_location(where: list[int | str], document: dict) -> str:
    """Return the location of an error, with a node's address.

    >>> document = {"nodes": [{}, {"address": "10.0.0.2"}]}
    >>> _format_location(["nodes", 1, "gpus", 0], document), _format_location(["ssh", "a", "port"], {})
    ('node 10.0.0.2: gpus: 0', 'ssh: a: port')
    """
    names = [part if isinstance(part, str) else shown(part) for part in where]
    if where[0] == "nodes" and len(where) > 1 and isinstance(where[1], int):
        nodes = document.get("nodes")
        node = nodes[where[1]] if isinstance(nodes, list) else None
        address = node.get("address") if isinstance(node, dict) else None
        usable = isinstance(address, str) and HOST.fullmatch(address)
        names[:2] = [f"node {address}" if usable else f"nodes: number {where[1] + 1}"]
    return ": ".join(name if name.isprintable() and len(name) <= 60 else shown(name) for name in names)
