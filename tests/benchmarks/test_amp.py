"""Style reward of a whole rollout, next to step by step: pytest -m benchmark -s tests/benchmarks.

On a CPU both compute the same products, so that the overhead of 24 calls is what differs: little for wide networks.
Times are of the processor, not of the wall: other work on the machine does not count.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict

from edenrl.modules import AMPReward, Discriminator

pytestmark = pytest.mark.benchmark

NUM_ENVS, STEPS, ROWS, REPEATS = 1024, 24, 50, 7


@pytest.mark.parametrize("hidden", [(64, 64), (256, 256)])
def test_a_rollout_in_one_pass(hidden: tuple[int, ...], in_turn: Callable[..., dict[str, float]]) -> None:
    reward = AMPReward(Discriminator(12, 5, hidden))
    step = {"amp_window": torch.randn(NUM_ENVS, STEPS, 60), "amp_gate": torch.ones(NUM_ENVS, STEPS, 1)}
    step["reward"] = torch.zeros(NUM_ENVS, STEPS, 1)
    data = TensorDict(next=step, batch_size=[NUM_ENVS, STEPS])
    rows = [row.clone() for row in data.reshape(-1, 1)[:ROWS]]
    cases = {
        "whole rollout": lambda: reward(data),
        "step by step": lambda: [reward(part) for part in data.unbind(1)],
        "row by row": lambda: [reward(part) for part in rows[:ROWS]],
    }
    scored = {"whole rollout": NUM_ENVS * STEPS, "step by step": NUM_ENVS * STEPS, "row by row": ROWS}
    medians = in_turn(f"hidden {hidden}, {NUM_ENVS} x {STEPS}", cases, REPEATS)
    each = {name: value / scored[name] for name, value in medians.items()}
    first = each["whole rollout"]
    for name, value in each.items():
        print(f"  {name:16s} {1e6 * value:8.3f} us a window  {value / first:7.1f} times the whole rollout")
    assert first > 0
