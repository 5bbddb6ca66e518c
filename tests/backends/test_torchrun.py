"""The store that ranks of one start by torchrun share, over a real store of torch's that earlier ranks have used."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from grace.backends import torchrun
from grace.errors import ExchangeError


@pytest.fixture
def store(monkeypatch):
    """torchrun's."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": served.port, "WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return served


def test_ranks_agree_on_a_name_whatever_earlier_ranks_have_left(store):
    named, heard = list[str](), list[str]()
    other = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=5))  # another process's
    for _ in range(3):  # starts; what the ones before have left stays
        later = threading.Timer(0.2, lambda: heard.append(torchrun._receive_name(store, 1, 5)))
        later.start()
        named.append(torchrun._announce_name(other, 2, 5))
        later.join()
    assert heard == named
    assert len(set(named)) == 3


def test_who_does_not_come_is_named(store, monkeypatch):
    store.set("grace/hello/1", "of an earlier start")
    with pytest.raises(ExchangeError, match=r"rank 0 of 2: rank 1 did not come to torchrun's store within 0.3 s"):
        torchrun.private_store(0.3)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ExchangeError, match=r"rank 1: rank 0 did not come to torchrun's store within 0.3 s"):
        torchrun.private_store(0.3)


def test_other_launchers_and_stores_are_left_alone(store, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    assert torchrun.private_store(0.3) == {}
