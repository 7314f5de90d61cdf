"""Seeds: one for an environment, and independent ones for its rows."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["chosen_seed", "process_seed", "spawn_seeds"]


def chosen_seed(seed: int | None) -> int:
    """``seed``, or one drawn from torch's global generator, so that ``torch.manual_seed`` makes a run repeatable.

    Args:
        seed: the seed, or None to draw one.

    Examples:
        >>> chosen_seed(7)
        7
    """
    return int(torch.randint(2**31 - 1, ()).item()) if seed is None else seed


def process_seed(seed: int, process: int) -> int:
    """The seed of one of several processes that train together: ``seed`` for the first, independent ones for the others.

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
        ValueError: ``seed`` is negative.

    Examples:
        >>> spawn_seeds(0, 8)[:2] == spawn_seeds(0, 2), set(spawn_seeds(0, 8)) & set(spawn_seeds(1, 8))
        (True, set())
    """
    return [int(word) >> 1 for word in np.random.SeedSequence(seed).generate_state(n)]
