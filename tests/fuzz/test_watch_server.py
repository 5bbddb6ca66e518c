"""Whatever comes over the watch's port: the watch's server goes on, and lets in who knows the token only."""

import json
import os
import random

import pytest

from grace.core import watch_server
from grace.core.watch_server import Line, WatchServer, parse_message
from tests.support.drawing import THOROUGH
from tests.support.mutations import NESTED, NUMBERS, WORDS

LINES = 100_000 if THOROUGH or os.environ.get("GRACE_FUZZ") else 2_000
TOKEN = "a secret"
SAID = [
    {"rank": 0, "token": TOKEN},
    {"rank": 1, "token": "guessed"},
    {"end": "failed: ValueError"},
    {"meet": 3, "kind": "broadcast", "name": "from_root()"},
    {"ask": 7},
    {"answer": 1, "places": ["a place"], "line": "train.py:7"},
]
ODD = [*NUMBERS, *WORDS, *NESTED, True, None, "\udfff", '"[', "\\", 2**64, {"a": [{}] * 9}, [[[[[[[[[[[]]]]]]]]]]]]


class Wire:
    """A socket over which one line has come."""

    def __init__(self, came=b""):
        self.came, self.sent, self.closed = came, b"", False

    def settimeout(self, seconds):
        """Nothing."""

    def setsockopt(self, *option):
        """Nothing."""

    def recv(self, most):
        part, self.came = self.came[:most], self.came[most:]
        return part

    def sendall(self, raw):
        self.sent += raw

    def close(self):
        self.closed = True


def drawn(rng):
    """A line that is nearly one of ranks', or nothing of the kind."""
    message = dict(rng.choice(SAID))
    for _ in range(rng.randrange(3)):
        message[rng.choice([*message, "rank", "token", "x"])] = rng.choice(ODD)
    line = json.dumps(message).encode()
    how = rng.randrange(10)
    if how == 0:
        line = rng.randbytes(rng.randrange(60))
    elif how == 1:
        line = rng.choice([b"[", b'{"a":', b"[{", b"[]", b'"', b"\\", b"9"]) * rng.choice([1, 9, 100, 20_000])
    elif how == 2:
        place = rng.randrange(len(line))
        line = line[:place] + rng.randbytes(rng.randrange(3)) + line[place + rng.randrange(3) :]
    elif how == 3:
        line = line.replace(b'"', rng.choice([b'"\xed\xa0\x80', b'"\\ud800', b"'", b'"\x00']), 1)
    return line.replace(b"\n", b" ")


@pytest.fixture
def server():
    """A server of three ranks, the last of which comes when the test is done with the others."""
    server = WatchServer(3, True, TOKEN)
    yield server
    server.close()


def come(server, line):
    """Somebody has connected and said this."""
    stranger = Line(Wire(line + b"\n"))
    server.unauthenticated[stranger] = None
    server._read(stranger)
    return stranger


def test_the_hub_goes_on_whatever_comes(server):
    seed = random.randrange(2**32) if os.environ.get("GRACE_FUZZ") else 0
    rng = random.Random(seed)
    for number in range(LINES):
        line, told = drawn(rng), f"seed {seed}, line {number}"
        message = parse_message(line)
        if number % 2:
            stranger = come(server, line)
            right = message is not None and message.get("token") == TOKEN and type(message.get("rank")) is int
            assert (stranger.rank >= 0) <= right, told
            assert stranger.socket.closed == (stranger.rank < 0), told
            server.ranks.clear()
            server.unauthenticated.clear()
        else:
            ranks = [come(server, json.dumps({"rank": rank, "token": TOKEN}).encode()) for rank in range(2)]
            ranks[1].socket.came = line + b"\n"
            while ranks[1].socket.came and not ranks[1].socket.closed:
                server._read(ranks[1])
            assert ranks[1].socket.closed == (message is None), told
            if message is None:
                assert server.ended[1] == watch_server.LOST, told
            elif "end" not in message:
                assert not server.ended, told
            server.ranks.clear()
            server.ended.clear()
            server.meetings.clear()
            server.asking.clear()
    assert server.thread.is_alive()
    held = Line(Wire())
    server.unauthenticated[held] = None
    ranks = [come(server, json.dumps({"rank": rank, "token": TOKEN}).encode()) for rank in range(3)]
    assert held.socket.closed  # all have come
    for rank in ranks:
        rank.socket.came = b'{"meet": 1, "kind": "k", "name": "n"}\n'
        server._read(rank)
    for rank in ranks:
        assert b'{"met": 1, "said": null}\n' in rank.socket.sent


@pytest.mark.parametrize(
    "line",
    [b'{"a": 1e999}', b'{"a": NaN}', b'{"a": "[[[[[[[[[[[[[[[[[[[[[[[["}', b'{"a": "\\"[[[[[[[[[[[[[[[[[[["}', b"{}"],
)
def test_brackets_in_words_are_not_depth(line):
    assert parse_message(line) is not None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[" * 10**6,
        b'{"a":' * 10**5,
        b"9" * 10**6,
        b'"' * 10**6,
        b'{"a": "\\',
        b"\xff",
        b"[]",
        b"[" * 40 + b"]" * 40,
    ],
    ids=range(9),
)
def test_what_is_no_message_is_none(line):
    assert parse_message(line) is None
