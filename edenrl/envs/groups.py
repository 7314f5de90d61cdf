"""Groups of environments that start in the same state, for algorithms that compare the members of a group."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv

__all__ = ["SameStateGroups", "assert_same_start", "repeat_in_groups", "set_group_size"]


class SameStateGroups:
    """Marks an environment that can start groups of rows in the same state; mix it into the environment's class.

    Rows ``0 .. group_size - 1`` are the first group, and so on. The environment promises that a *full* reset, one
    without a ``"_reset"`` mask, puts all members of a group into the same state, another one for each group and each
    reset. Partial resets, in the middle of a rollout, are as without groups, with one liberty: rows may go on sharing
    their random numbers, as Gymnasium's do once they were seeded alike.

    To keep the promise, read ``self.group_size`` in ``_reset``; ``repeat_in_groups`` does the rest where the state is a
    dictionary of tensors.

    Examples:
        >>> from edenrl.envs import PointMass, SameStateGroups, make_env
        >>> isinstance(PointMass(2), SameStateGroups), isinstance(make_env("CartPole-v1", 2), SameStateGroups)
        (True, True)
    """

    group_size: int = 1
    """Rows per group; 1: every row on its own."""


def set_group_size(env: EnvBase, group_size: int) -> None:
    """Make every full reset from now on start each group of consecutive rows in the same state.

    Args:
        env: the environment, transformed or not.
        group_size: rows per group, at least 2, which must divide the number of rows.

    Raises:
        ValueError: the innermost environment cannot start groups in the same state (it is no ``SameStateGroups``), or
            ``group_size`` is below 2 or no divisor of the number of rows.

    Examples:
        >>> from edenrl.envs import make_env, set_group_size
        >>> env = make_env("CartPole-v1", num_envs=4, seed=0)
        >>> set_group_size(env, 2)
        >>> first = env.reset()["observation"]
        >>> [bool((first[i] == first[j]).all()) for i, j in [(0, 1), (1, 2), (2, 3)]]
        [True, False, True]
    """
    while isinstance(env, TransformedEnv):
        env = env.base_env
    rows = env.batch_size.numel()
    if not isinstance(env, SameStateGroups):
        raise ValueError(
            f"{type(env).__name__} cannot start several rows in the same state, which groups need. Use PointMass or a "
            "Gymnasium id, or let your environment keep the promise of edenrl.envs.SameStateGroups."
        )
    if group_size < 2 or rows % group_size:
        raise ValueError(f"group_size={group_size} was given for {rows} rows; expected a divisor of {rows} from 2 on.")
    env.group_size = group_size


def repeat_in_groups(state: dict[str, Tensor], group_size: int) -> dict[str, Tensor]:
    """The state with every row replaced by the first row of its group.

    Args:
        state: tensors ``[N, ...]``.
        group_size: rows per group, a divisor of N.

    Examples:
        >>> import torch
        >>> from edenrl.envs import repeat_in_groups
        >>> repeat_in_groups({"x": torch.arange(4)}, 2)["x"].tolist()
        [0, 0, 2, 2]
    """
    if group_size == 1:
        return state
    return {name: value[::group_size].repeat_interleave(group_size, 0) for name, value in state.items()}


def assert_same_start(rollout: TensorDictBase, keys: list[str], group_size: int) -> None:
    """Check that the first observations of a rollout are equal within each group.

    Args:
        rollout: ``[N, T]``, collected right after a full reset.
        keys: the observations to compare.
        group_size: rows per group.

    Raises:
        ValueError: for the first observation that differs, naming key and row.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from edenrl.envs import assert_same_start
        >>> rollout = TensorDict(observation=torch.zeros(4, 5, 3), batch_size=[4, 5])
        >>> assert_same_start(rollout, ["observation"], 2)
    """
    for key in keys:
        first = rollout[:, 0].get(key)
        same = (first == repeat_in_groups({key: first}, group_size)[key]).flatten(1).all(1)
        if not bool(same.all()):
            row = int(torch.nonzero(~same)[0])
            raise ValueError(
                f"Row {row} starts with another {key!r} than row {row - row % group_size}, the first of its group of "
                f"{group_size}. The environment must start all members of a group in the same state at a full reset "
                "(edenrl.envs.SameStateGroups), and nothing in front of the policy may add noise."
            )
