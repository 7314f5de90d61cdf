"""Constrained PPO with a task and a style channel (ConTrack)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor
from torchrl.data import Composite
from torchrl.objectives.value import ValueEstimatorBase

from edenrl.modules import TaskConstraint
from edenrl.objectives.base import require_instance
from edenrl.objectives.gae import GAE
from edenrl.objectives.ppo import PPOLoss

__all__ = ["CMDPLoss", "TwoChannelGAE", "check_reward_groups"]

REWARD_GROUPS = ("task", "style", "penalty")


def check_reward_groups(published: Composite | TensorDictBase | None) -> None:
    """Raises unless exactly the reward groups ``task``, ``style`` and ``penalty`` are there.

    An additional group would not enter any value, and a missing group would count as zero. Call this function on the
    environment's ``observation_spec`` before you build networks; ``TwoChannelGAE`` checks every rollout.

    Args:
        published: observation spec, or step, that holds the groups under ``reward_groups``.

    Raises:
        ValueError: naming the groups that are missing and those that are unknown.

    Examples:
        >>> from edenrl.envs import ConflictPointMass
        >>> check_reward_groups(ConflictPointMass(2).observation_spec)
    """
    groups: Any = None if published is None else published.get("reward_groups", None)
    _check_names(() if groups is None else groups.keys())


def _check_names(names: Iterable[str]) -> None:
    found = sorted(names)
    if set(found) == set(REWARD_GROUPS):
        return
    missing = [group for group in REWARD_GROUPS if group not in found]
    unknown = [group for group in found if group not in REWARD_GROUPS]
    problems = [f"lacks {missing}"] if missing else []
    if unknown:
        problems.append(f"has the unknown groups {unknown}")
    raise ValueError(
        f"The environment publishes the reward groups {found}; constrained PPO needs exactly {list(REWARD_GROUPS)} "
        f"under ('next', 'reward_groups'): it {' and '.join(problems)}. Every term must be in one of the three, "
        "because the critic sees no other; a group without terms is zero. ConflictPointMass publishes them, Quadruped "
        "with 'reward_groups' among --env.kwargs.groups."
    )


class TwoChannelGAE(GAE):
    """GAE for a task and a style channel, each with its own value.

    ``("next", "reward_groups")`` holds ``task``, ``style`` and ``penalty``, ``[N, T, 1]`` each. The rewards are
    ``task + penalty`` in channel 0 and ``style + penalty`` in channel 1; they are written as ``("next",
    "reward_channels")`` ``[N, T, 2]``. The ends of episodes are shared; ``state_value``, ``advantage`` and
    ``value_target`` are ``[N, T, 2]``, and ``average_gae=True`` standardizes the advantages of each channel on its own.

    Args:
        kwargs: options of ``GAE``; the value network has two values, ``value_critic(groups, num_values=2)``.

    Raises:
        ValueError: for reward groups other than these three, or a critic that does not have two values; and as ``GAE``.

    Source: ConTrack, 2026.

    Examples:
        >>> import torch
        >>> from edenrl.envs import ConflictPointMass
        >>> from edenrl.modules import value_critic
        >>> from edenrl.objectives import TwoChannelGAE
        >>> rollout = ConflictPointMass(3, seed=0).rollout(5)
        >>> gae = TwoChannelGAE(gamma=0.99, lmbda=0.95, value_network=value_critic({"observation": 10}, num_values=2))
        >>> gae(rollout)["advantage"].shape
        torch.Size([3, 5, 2])
    """

    @dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):
        reward: NestedKey = "reward_channels"
        reward_groups: NestedKey = "reward_groups"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        """Writes rewards, values, advantages and value targets of both channels into the rollout and returns it."""
        groups = tensordict.get(("next", self.tensor_keys.reward_groups), None)
        _check_names(() if groups is None else groups.keys())
        channels = torch.cat([groups.get("task"), groups.get("style")], -1) + groups.get("penalty")
        tensordict.set(("next", self.tensor_keys.reward), channels)
        return super().forward(tensordict, **kwargs)

    def _inputs(self, data: TensorDictBase) -> list[NestedKey]:
        # The groups come before their sum, so that an error names the group that is not finite.
        groups = [unravel_key(("next", self.tensor_keys.reward_groups, group)) for group in REWARD_GROUPS]
        *observations, channels = super()._inputs(data)
        # Nothing is learned from the plain reward, but a NaN in it says that the environment is at fault.
        return [*observations, ("next", "reward"), *groups, channels]

    def _prepare_signals(
        self, reward: Tensor, done: Tensor, terminated: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if value.shape != reward.shape:
            raise ValueError(
                f"TwoChannelGAE needs a critic of two values, task and style, {tuple(reward.shape)}; its values are "
                f"{tuple(value.shape)}. Build it with value_critic(groups, num_values=2)."
            )
        return super()._prepare_signals(reward, done, terminated, value)


class CMDPLoss(PPOLoss):
    """PPO whose advantage is mixed from a task and a style channel, ``w A_task + (1 - w) A_style``.

    ``w`` is the weight of a ``TaskConstraint``, which moves it so that the task return stays at ``alpha`` times its
    best. The value loss is the mean over both channels, each clipped on its own. Everything else is ``PPOLoss``, which
    this loss equals when both channels are equal.

    Further outputs, detached: ``task_weight``, ``lambda``, ``task_return``, ``task_return_best`` and ``task_ratio`` of
    the constraint.

    Args:
        actor_network: as for ``PPOLoss``.
        critic_network: writes ``state_value`` ``[*batch, 2]``; ``None`` trains the policy alone.
        constraint: whose weight mixes the channels; its state is part of the loss's.
        kwargs: options of ``PPOLoss``, except ``normalize_advantage``.

    Raises:
        ValueError: for an advantage, a value or a value target that is not ``[*batch, 2]``; for
            ``normalize_advantage=True``, which would undo the mixture: ``TwoChannelGAE(average_gae=True)`` standardizes
            each channel.

    Source: ConTrack, 2026. The constraint is always a share of the best task return, as in that paper. To limit a cost
    in its own units, write another dual controller.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import TaskConstraint, gaussian_actor, value_critic
        >>> from edenrl.objectives import CMDPLoss
        >>> actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3}, num_values=2)
        >>> loss = CMDPLoss(actor, critic, TaskConstraint(alpha=0.9))
        >>> data = critic(actor(TensorDict(observation=torch.randn(8, 3), batch_size=[8]))).detach()
        >>> data = data.update({"advantage": torch.randn(8, 2), "value_target": torch.randn(8, 2)})
        >>> float(loss(data)["task_weight"])
        0.5
    """

    @dataclass
    class _AcceptedKeys(PPOLoss._AcceptedKeys):
        pass

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule | None,
        constraint: TaskConstraint,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("normalize_advantage"):
            raise ValueError(
                "CMDPLoss does not normalize the mixed advantage, which would undo the mixture; standardize each "
                "channel with TwoChannelGAE(average_gae=True)."
            )
        require_instance(self, "constraint", constraint, TaskConstraint)
        super().__init__(actor_network, critic_network, **kwargs)
        self.constraint = constraint

    def _estimator_keys(self) -> list[NestedKey]:
        return []  # TwoChannelGAE reads reward groups, and runs before the loss

    def _make_out_keys(self) -> list[NestedKey]:
        return [*super()._make_out_keys(), *self.constraint.metrics()]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of a batch of any shape."""
        names = self.tensor_keys
        for key in [names.advantage, *([names.value, names.value_target] if self._has_critic else [])]:
            entry = tensordict.get(key, None)
            if entry is not None and entry.shape != (*tensordict.batch_size, 2):
                raise ValueError(
                    f"CMDPLoss needs a task and a style channel: {key!r} of shape {(*tensordict.batch_size, 2)}, got "
                    f"{tuple(entry.shape)}. Use a critic of two values, value_critic(groups, num_values=2), and "
                    "TwoChannelGAE."
                )
        metrics = self.constraint.metrics()
        mixed = tensordict.copy()
        if (advantage := tensordict.get(names.advantage, None)) is not None:
            task, style = advantage.unbind(-1)
            # Exactly their value where both are equal.
            mixed.set(names.advantage, (style + metrics["task_weight"] * (task - style)).unsqueeze(-1))
        return super().forward(mixed).update(metrics)
