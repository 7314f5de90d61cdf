"""Seeds: one for an environment, and independent ones for its rows."""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch

__all__ = ["checked_seed", "chosen_seed", "process_seed", "spawn_seeds"]


def checked_seed(seed: int) -> int:
    """``seed``, if every random generator takes it.

    Args:
        seed: a whole number from 0 to 2**64 - 1.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> checked_seed(2**64)
        Traceback (most recent call last):
        ...
        ValueError: seed is 18446744073709551616; expected a whole number from 0 to 2**64 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to 2**64 - 1.")
    return int(seed)


def chosen_seed(seed: int | None) -> int:
    """``seed``, or one drawn from torch's global generator, so that ``torch.manual_seed`` makes a run repeatable.

    Args:
        seed: the seed, or None to draw one.

    Raises:
        ValueError: for a seed that ``checked_seed`` refuses.

    Examples:
        >>> chosen_seed(7)
        7
    """
    return int(torch.randint(2**31 - 1, ()).item()) if seed is None else checked_seed(seed)


def process_seed(seed: int, process: int) -> int:
    """The seed of one of several processes that train together: ``seed`` itself for the first of them.

    Args:
        seed: seed of the run.
        process: number of the process, from 0.

    Examples:
        >>> process_seed(3, 0), process_seed(3, 1) != process_seed(4, 0)
        (3, True)
    """
    return spawn_seeds(seed, process + 1)[process] if process else seed


def spawn_seeds(seed: int, n: int) -> list[int]:
    """``n`` seeds for ``n`` random streams that are independent of each other and of those of any other ``seed``.

    The first seeds do not depend on ``n``. They fit 31 bits, which every simulator takes.

    Args:
        seed: seed of all of them, not negative.
        n: how many.

    Raises:
        ValueError: ``seed`` is negative or too large.

    Examples:
        >>> spawn_seeds(0, 8)[:2] == spawn_seeds(0, 2), set(spawn_seeds(0, 8)) & set(spawn_seeds(1, 8))
        (True, set())
    """
    return [int(word) >> 1 for word in np.random.SeedSequence(checked_seed(seed)).generate_state(n)]
