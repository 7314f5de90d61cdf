"""Which episodes of a rollout count in statistics."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["whole_episode_ends"]


def whole_episode_ends(rollout: TensorDictBase) -> Tensor:
    """Where whole episodes ended: ``("next", "done")`` without the episodes that ``("next", "late_start")`` marks.

    The first episodes of a run may be shortened at random (``edenrl.envs.RandomStart``). Their returns and lengths say
    nothing about the policy.

    Args:
        rollout: data of any batch shape with ``("next", "done")``.

    Returns:
        Flags of the shape of ``("next", "done")``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> done, late = torch.tensor([[False], [True], [True]]), torch.tensor([[True], [True], [False]])
        >>> whole_episode_ends(TensorDict(next=dict(done=done, late_start=late), batch_size=[3])).squeeze(-1)
        tensor([False, False,  True])
    """
    done: Tensor = rollout["next", "done"]
    late = rollout.get(("next", "late_start"), None)
    return done if late is None else done & ~late
