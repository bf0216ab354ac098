"""A random permutation that is computed, not stored: element by element, in either direction.

The numbers below a power of two are permuted by a Feistel network: their bits are divided into two halves, and each round
adds a keyed function of one half to the other (M. Luby, C. Rackoff, "How to construct pseudorandom permutations from
pseudorandom functions", SIAM J. Comput. 17(2), 1988). A result outside of the range is permuted again until it is inside
("cycle walking": J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The smallest power of two is
less than twice the range, so that takes less than two passes on average. The function of a round is the finaliser of
SplitMix64 (G. Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014): fast, and not meant to keep a
secret.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy
from numpy import uint64
from numpy.typing import NDArray

_ROUNDS: Final = 12
_SMALL: Final = 4096
"""Sizes up to which the number of rounds is doubled: a half of few bits has few functions, so that with fewer rounds some
permutations of a few elements would be more frequent than others."""
_FIRST, _SECOND = uint64(0xBF58476D1CE4E5B9), uint64(0x94D049BB133111EB)
_SHIFTS: Final = (uint64(30), uint64(27), uint64(31))


class Permutation:
    """A permutation of ``range(size)``, as a function of ``size`` and a key. Creating it costs the same for every size."""

    def __init__(self, size: int, key: Sequence[int]) -> None:
        """
        Args:
            size: number of elements, from 1 to 2**62.
            key: selects the permutation.

        Raises:
            ValueError: the size is not in that range.
        """
        if not 1 <= size <= 2**62:
            raise ValueError(f"cannot permute {size} elements")
        bits = max((size - 1).bit_length(), 1)
        self._size = uint64(size)
        self._low = uint64(bits // 2)
        self._masks = uint64((1 << (bits - bits // 2)) - 1), uint64((1 << (bits // 2)) - 1)  # of the high and the low half
        rounds = _ROUNDS if size > _SMALL else 2 * _ROUNDS
        random = hashlib.shake_256(f"permutation:{','.join(map(str, key))}".encode()).digest(8 * rounds)
        self._keys = list(numpy.frombuffer(random, "<u8").astype(uint64))

    def __call__(self, positions: NDArray[Any]) -> NDArray[numpy.int64]:
        """Return the elements at ``positions``.

        Raises:
            ValueError: a position is not in ``range(size)``.
        """
        return self._walked(positions, self._forward)

    def inverse(self, elements: NDArray[Any]) -> NDArray[numpy.int64]:
        """Return the positions of ``elements``.

        Raises:
            ValueError: an element is not in ``range(size)``.
        """
        return self._walked(elements, self._backward)

    def _walked(self, numbers: NDArray[Any], step: Callable[[NDArray[uint64]], NDArray[uint64]]) -> NDArray[numpy.int64]:
        given = numpy.asarray(numbers, uint64)
        if len(given) and given.max() >= self._size:  # its walk might never come back
            raise ValueError(f"{given.max()} is not below {self._size}")
        found = step(given)
        while len(outside := numpy.flatnonzero(found >= self._size)):
            found[outside] = step(found[outside])
        return found.astype(numpy.int64)

    def _forward(self, numbers: NDArray[uint64]) -> NDArray[uint64]:
        halves = [numbers >> self._low, numbers & self._masks[1]]
        for number, key in enumerate(self._keys):
            self._round(halves, number % 2, key)
        return (halves[0] << self._low) | halves[1]

    def _backward(self, numbers: NDArray[uint64]) -> NDArray[uint64]:
        halves = [numbers >> self._low, numbers & self._masks[1]]
        for number, key in reversed(list(enumerate(self._keys))):
            self._round(halves, number % 2, key)
        return (halves[0] << self._low) | halves[1]

    def _round(self, halves: list[NDArray[uint64]], half: int, key: uint64) -> None:
        """Add a function of the other half to ``halves[half]``. A second time, this undoes the first."""
        mixed = halves[1 - half] + key
        mixed ^= mixed >> _SHIFTS[0]
        mixed *= _FIRST
        mixed ^= mixed >> _SHIFTS[1]
        mixed *= _SECOND
        mixed ^= mixed >> _SHIFTS[2]
        mixed &= self._masks[half]
        halves[half] = halves[half] ^ mixed
