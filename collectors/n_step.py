"""Windows of several steps within a flat row of stored steps."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["n_step_windows"]


def n_step_windows(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    first: Tensor,
    num_envs: int,
    n_steps: int,
    gamma: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What happens in the windows that begin at given steps and end after ``n_steps``, or at the end of an episode.

    Args:
        reward: rewards ``[size, 1]`` of all stored steps in a ring buffer: the rows of all environments at one time
            step, then those of the next time step.
        terminated: whether an episode terminated with the step, same layout.
        truncated: whether one was truncated, same layout.
        first: positions ``[batch]`` of the steps at which the windows begin.
        num_envs: number of environments: the distance between consecutive steps of one environment.
        n_steps: steps of a window.
        gamma: discount of the rewards in a window.

    Returns:
        The lengths ``[batch, 1]``; and "reward", the discounted sum, with "terminated", "truncated" and "done" at the
        end of the window, each ``[batch, 1]``.

    Examples:
        >>> over = torch.tensor([[False], [True], [False]])
        >>> steps, outcome = n_step_windows(torch.ones(3, 1), over, over, torch.tensor([0, 1]), 1, 3, gamma=0.5)
        >>> steps.flatten().tolist(), outcome["reward"].flatten().tolist()
        ([2, 1], [1.5, 1.0])
    """
    window = (first.unsqueeze(-1) + num_envs * torch.arange(n_steps, device=first.device)) % len(reward)
    reward, terminated, truncated = (flat[window].squeeze(-1) for flat in (reward, terminated, truncated))
    ended = terminated | truncated
    counted = ended.cumsum(-1) - ended.long() == 0  # up to and including the first end
    steps = counted.sum(-1, keepdim=True)
    discounts = gamma ** torch.arange(n_steps, device=reward.device, dtype=reward.dtype)
    total = (torch.where(counted, reward, 0.0) * discounts).sum(-1, keepdim=True)
    terminated, truncated = (flags.gather(-1, steps - 1) for flags in (terminated, truncated))
    done = terminated | truncated
    return steps, {"reward": total, "terminated": terminated, "truncated": truncated, "done": done}
