"""Counter-based random numbers: Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011; 7 rounds is the fewest that passes BigCrush there).

The number for element ``i`` is word ``i % 4`` of the block with counter
``(i // 4 low, i // 4 high, step, draw)`` under a key made of (seed, variable name, rank or "shared"). It
depends on nothing else, so every framework and device draws the same integers, a resumed run continues
bit for bit, and ranks that share a key agree without talking.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

ROUNDS = 7
# The constants of Philox4x32, and of its key schedule.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
FEISTEL_ROUNDS = 8
FEISTEL_DRAW = 1 << 31
"""Bit in the draw word of numbers that permute indices, so that they differ from all others."""


@dataclass(frozen=True)
class Stream:
    """A sequence of random numbers, one per element index.

    Attributes:
        key: 64-bit key.
        step: 32-bit step (a whole number, or a scalar tensor in a traced graph; torch's are int64).
        draw: which of several sequences of the step, below 2**31.
    """

    key: int
    step: int = 0
    draw: int = 0

    @property
    def words(self) -> tuple[int, int, int, int]:
        """Words of 32 bits: key low, key high, step, draw."""
        return self.key & 0xFFFFFFFF, self.key >> 32, self.step & 0xFFFFFFFF, self.draw

    def permuting(self) -> "Stream":
        """Return the stream that random indices are drawn from."""
        return replace(self, draw=self.draw | FEISTEL_DRAW)


@lru_cache(maxsize=65536)
def stream_key(seed: int, name: str, who: str) -> int:
    """Return the 64-bit key of (seed, variable name, rank or "shared").

    >>> stream_key(0, "w", "shared") == stream_key(0, "w", "shared") != stream_key(0, "w", "1")
    True
    """
    text = f"{seed}\0{name}\0{who}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def philox(
    counter: tuple[np.ndarray, ...], key: tuple[int, int], rounds: int = ROUNDS
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the four output words of each block: uint32 arrays in, uint32 arrays out.

    >>> zero = np.zeros(1, np.uint32)
    >>> [f"{int(word[0]):08x}" for word in philox((zero,) * 4, (0, 0))]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    # In 64 bits, which hold products of two 32-bit numbers.
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    k0, k1 = key
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    for _ in range(rounds):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return tuple(word.astype(np.uint32) for word in (c0, c1, c2, c3))  # type: ignore[return-value]


def feistel_bits(n: int) -> tuple[int, int]:
    """Return the bits of the left and right half of the Feistel domain that holds n: the smallest power of two, but
    none of 8 to 32, on which a few rounds do not mix (of n = 5, some indices would be drawn 5 % too often).

    >>> feistel_bits(1000), feistel_bits(10), feistel_bits(4)
    ((5, 5), (3, 3), (1, 1))
    """
    bits = 2 if n <= 4 else max(6, (n - 1).bit_length())
    return bits // 2, bits - bits // 2
