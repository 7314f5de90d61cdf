"""Reward normalization by the scale of the returns. Samples use the current statistics, not those at collection."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from edenrl.modules import merge_moments, refuse_nonfinite, several_processes

__all__ = ["RewardNormalizer"]

_STATS_EPS, _NORM_EPS = 1e-4, 1e-8


class RewardNormalizer(Transform):
    """Divides rewards so that discounted returns have about unit variance and stay within ``max_return``.

    A transform of a replay buffer: ``extend`` updates the discounted return of every environment and the statistics of
    these returns. ``sample`` divides rewards by the current ``max(std of the returns, largest return / max_return)``.
    The mean is not subtracted. Processes that train together share the statistics; each tracks the returns of its own
    environments.

    Args:
        num_envs: environments, rows of the data that extends the buffer.
        gamma: discount of the returns.
        max_return: bound of the normalized returns, the end of the critic's support.

    Raises:
        ValueError: for rewards that are not finite, or of another number of environments.

    Source: FlashSAC, arXiv:2604.04539; its release lets the reward of an episode's last step leak into the next one,
    which is not done here.

    Examples:
        >>> from tensordict import TensorDict
        >>> normalizer = RewardNormalizer(1, gamma=0.5, max_return=5.0)
        >>> end = torch.tensor([[[False], [True]]])
        >>> data = {"next": {"reward": torch.tensor([[[10.0], [20.0]]]), "terminated": end, "truncated": end}}
        >>> normalizer.update(TensorDict(data, batch_size=[1, 2])["next"])
        >>> float(normalizer.largest), round(float(normalizer.scale), 3)  # returns 10 and 0.5 * 10 + 20
        (25.0, 7.5)
    """

    returns: Tensor
    largest: Tensor
    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, num_envs: int, gamma: float = 0.99, max_return: float = 5.0) -> None:
        if num_envs < 1 or not 0 < gamma <= 1 or not max_return > 0:
            raise ValueError(
                f"RewardNormalizer needs num_envs >= 1, gamma in (0, 1] and max_return > 0, got {num_envs}, {gamma} "
                f"and {max_return}."
            )
        super().__init__(in_keys=[], out_keys=[])
        self.gamma, self.max_return = gamma, max_return
        for name, value in (
            ("returns", torch.zeros(num_envs)),
            ("largest", torch.tensor(0.0)),
            ("mean", torch.tensor(0.0)),
            ("var", torch.tensor(1.0)),
            ("count", torch.tensor(0.0)),
        ):
            self.register_buffer(name, value.double())

    @property
    def scale(self) -> Tensor:
        """What rewards are divided by."""
        return torch.maximum((self.var + _NORM_EPS).sqrt(), self.largest / self.max_return)

    @torch.no_grad()
    def update(self, ended: TensorDictBase) -> None:
        """Follows the returns over the ``("next", ...)`` part ``[N, T]`` of collected data."""
        reward = ended["reward"].squeeze(-1).to(self.returns)
        done = (ended["terminated"] | ended["truncated"]).squeeze(-1)
        if len(reward) != len(self.returns):
            raise ValueError(f"RewardNormalizer({len(self.returns)}) was given rewards of {len(reward)} environments.")
        refuse_nonfinite(ended, ["reward"])
        for step in range(reward.shape[1]):
            self.returns.mul_(self.gamma).add_(reward[:, step])
            largest = self.returns.abs().max()
            if several_processes():
                dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            own = self.returns
            new, mean, var = merge_moments(len(own), own.mean(), own.var(correction=0))
            total = self.count + new
            delta = mean - self.mean
            between = delta.square() * self.count * new / total
            self.var.copy_((self.var * (self.count + _STATS_EPS) + var * new + between) / total)
            self.mean.add_(delta * new / total)
            self.count.copy_(total)
            self.largest.copy_(torch.maximum(self.largest, largest))
            self.returns.masked_fill_(done[:, step], 0.0)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.update(tensordict["next"].transpose(0, 1))  # the buffer stores time first
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Divides ``("next", "reward")`` of a sample."""
        reward = tensordict["next", "reward"]
        return tensordict.set(("next", "reward"), reward / self.scale.to(reward))
