"""Rewards that an environment publishes in groups, summed and scaled as the reward is."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import Transform

__all__ = ["RewardGroups"]


class RewardGroups(Transform):
    """Sums each reward group over the episode, then scales the groups as the reward is scaled.

    An environment that splits its reward publishes ``("next", "reward_groups", name)`` ``[N, 1]`` for each group. This
    transform adds ``("next", "metrics", f"{name}_return")`` ``[N, 1]``, the group's sum since the row's last reset in
    the environment's own units (zero at reset, never scaled), and multiplies the groups themselves by ``scale``.
    ``wrap_env`` adds it to environments that publish groups.

    Args:
        scale: factor on the groups. Default 1.0.

    Examples:
        >>> from edenrl.envs import ConflictPointMass, RewardGroups
        >>> from torchrl.envs import TransformedEnv
        >>> data = TransformedEnv(ConflictPointMass(2, seed=0), RewardGroups(scale=0.5)).rollout(4)
        >>> bool((2 * data["next", "reward_groups", "task"].sum(1) - data["next", "metrics", "task_return"][:, -1] < 1e-5).all())
        True
    """  # noqa: E501

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.scale = scale

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        for name, reward in next_tensordict["reward_groups"].items():
            total = ("metrics", f"{name}_return")
            next_tensordict.set(total, tensordict[total] + reward)
        return self._scaled(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # Rows that are not reset keep their own: TorchRL merges by row.
        for name, reward in tensordict_reset["reward_groups"].items():
            tensordict_reset.set(("metrics", f"{name}_return"), torch.zeros_like(reward))
        return self._scaled(tensordict_reset)

    def _scaled(self, tensordict: TensorDictBase) -> TensorDictBase:
        groups = tensordict["reward_groups"]
        return tensordict.set("reward_groups", groups.apply(lambda reward: reward * self.scale))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the sums."""
        groups = observation_spec["reward_groups"]
        if "metrics" not in observation_spec.keys():
            observation_spec["metrics"] = Composite(shape=observation_spec.shape, device=observation_spec.device)
        for name, leaf in groups.items():
            observation_spec["metrics", f"{name}_return"] = leaf.clone()
        return observation_spec
