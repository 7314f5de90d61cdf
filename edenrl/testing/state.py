"""Check that a loss can be saved and restored."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from edenrl.testing.calls import call, compare, fresh_copy, require, without_nan

__all__ = ["check_state"]


def check_state(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Requires that ``state_dict`` restores what forward advances, and every parameter and buffer."""
    _check_advanced_state(loss, tensordict)
    _check_loading(loss, tensordict)


def _check_advanced_state(loss: LossModule, tensordict: TensorDictBase) -> None:
    """What forward advances must travel with the checkpoint."""
    advanced = fresh_copy(loss)
    before = _numbers(advanced)
    for _ in range(2):
        call(advanced, tensordict)
    moved = [name for name, value in _numbers(advanced).items() if name not in before or before[name] != value]
    require(not moved, loss, f"forward changes {moved}, absent from state_dict; keep it in a buffer, changed in place.")
    restored = fresh_copy(loss)
    restored.load_state_dict(copy.deepcopy(advanced.state_dict()))
    difference = compare(call(restored, tensordict), call(advanced, tensordict))
    require(
        not difference,
        loss,
        f"state_dict does not restore the loss after two calls: {difference}; keep what changes in persistent buffers.",
    )


def _check_loading(loss: LossModule, tensordict: TensorDictBase) -> None:
    """Every saved value must replace whatever was there."""
    saved = {name: value.clone() for name, value in loss.state_dict().items() if isinstance(value, Tensor)}
    probe = fresh_copy(loss)
    with torch.no_grad():
        for tensor in chain(probe.parameters(), probe.buffers()):
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
    probe.load_state_dict(copy.deepcopy(loss.state_dict()))
    loaded = probe.state_dict()
    wrong = [name for name, value in saved.items() if not torch.equal(without_nan(loaded[name]), without_nan(value))]
    require(not wrong, loss, f"load_state_dict does not restore {wrong}; drop the override or make it complete.")
    difference = compare(call(probe, tensordict), call(fresh_copy(loss), tensordict))
    require(
        not difference,
        loss,
        f"parameters and buffers were changed and state_dict loaded again, but {difference}; register what is missing "
        "from state_dict as a persistent buffer.",
    )


def _numbers(loss: LossModule) -> dict[str, Any]:
    """The plain numbers that any module inside keeps as attributes, by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in loss.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (int, float))
    }
