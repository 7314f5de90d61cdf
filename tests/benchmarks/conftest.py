"""How the benchmarks take their times: all cases in turn, so that what disturbs one disturbs the others."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from benchmarks.measuring import alternate


def _in_turn(
    title: str, cases: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    def timed(run: Callable[[], object]) -> Callable[[], float]:
        def measure() -> float:
            begin = clock()
            run()
            return clock() - begin

        return measure

    times = alternate({name: timed(run) for name, run in cases.items()}, repeats)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"\n{title} (load {load}, {torch.get_num_threads()} threads)")
    return {name: statistics.median(values) for name, values in times.items()}


@pytest.fixture
def in_turn() -> Callable[..., dict[str, float]]:
    """Prints a title and the machine's load; returns the median seconds of each case over some repeats.

    Processor time unless another clock is given: other work on the machine does not count then.
    """
    return _in_turn
