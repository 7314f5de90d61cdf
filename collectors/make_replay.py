"""The replay buffer of off-policy training, for bounded actions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.envs import ActionScaling, Compose

from edenrl.collectors.replay import NStepReplayBuffer
from edenrl.collectors.reward_normalizer import RewardNormalizer

__all__ = ["make_replay"]


def make_replay(
    observations: Iterable[NestedKey],
    low: Tensor,
    high: Tensor,
    num_envs: int,
    *,
    gamma: float,
    max_return: float | None = None,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    memmap: str | None = None,
    **options: Any,
) -> NStepReplayBuffer:
    """A buffer that holds actions in the environment's units and gives them to the networks in [-1, 1].

    Args:
        observations: entries that are kept; one that is named twice is kept once.
        low: lower bounds of the action, ``[a]``.
        high: upper bounds of the action, ``[a]``.
        num_envs: environments that are stepped together.
        gamma: discount per step.
        max_return: rewards are divided so that returns stay within this magnitude (``RewardNormalizer``). Default:
            rewards as they were collected.
        device: where the data lie.
        dtype: how observations are stored: "float32", "float16" or "bfloat16".
        memmap: directory that holds the data, for buffers larger than the memory; they are then read on the CPU.
        options: further options of ``NStepReplayBuffer``, such as ``max_size``, ``n_steps``, ``batch_size``.

    Examples:
        >>> low, high = torch.tensor([-2.0]), torch.tensor([2.0])
        >>> make_replay(["observation"], low, high, 8, gamma=0.99, max_size=100, n_steps=1, batch_size=4).can_sample()
        False
    """
    if memmap is not None:
        device = "cpu"
    transforms: list[Any] = [ActionScaling(loc=(low + high) / 2, scale=(high - low) / 2, in_keys_inv=[])]
    if max_return is not None:
        transforms.append(RewardNormalizer(num_envs, gamma, max_return))
    return NStepReplayBuffer(
        observations=list(dict.fromkeys(observations)),
        observation_dtype=getattr(torch, dtype),
        device=torch.device(device),
        transform=Compose(*transforms).to(device),
        memmap=memmap,
        gamma=gamma,
        **options,
    )
