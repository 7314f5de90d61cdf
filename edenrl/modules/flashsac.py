"""FlashSAC networks: an actor and a distributional critic of several members, made of unit-norm layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.modules import ProbabilisticActor

from edenrl.modules.actor_critic import gaussian_actor, is_one_categorical, refuse_several_discrete, tanh_bounds
from edenrl.modules.groups import GroupModule, require_groups
from edenrl.modules.mlp import at_least, concatenate
from edenrl.modules.projection import require_sizes
from edenrl.modules.unit_norm import UnitBatchNorm, UnitLinear, UnitRMSNorm

__all__ = ["FlashActor", "FlashCritic", "flash_actor", "flash_critic"]

_LOG_STD_MIN, _LOG_STD_MAX = -10.0, 2.0


class _Block(nn.Module):
    def __init__(self, dim: int, members: int | None, expansion: int) -> None:
        super().__init__()
        self.w1, self.bn1 = UnitLinear(dim, expansion * dim, members), UnitBatchNorm(expansion * dim, members)
        self.w2, self.bn2 = UnitLinear(expansion * dim, dim, members), UnitBatchNorm(dim, members)

    def forward(self, x: Tensor, batch_stats: bool, member: int | None = None) -> Tensor:
        hidden = F.relu(self.bn1(self.w1(x, member), batch_stats, member))
        return x + F.relu(self.bn2(self.w2(hidden, member), batch_stats, member))


class _Trunk(nn.Module):
    def __init__(self, in_features: int, dim: int, num_blocks: int, members: int | None, expansion: int) -> None:
        super().__init__()
        require_sizes(
            "A FlashSAC network", in_features=in_features, hidden_dim=dim, num_blocks=num_blocks, expansion=expansion
        )
        self.bn, self.weight = UnitBatchNorm(in_features, members), UnitLinear(in_features, dim, members)
        self.blocks = nn.ModuleList(_Block(dim, members, expansion) for _ in range(num_blocks))
        self.post = UnitRMSNorm(dim, members)

    def forward(self, x: Tensor, batch_stats: bool, member: int | None = None, rows: slice = slice(None)) -> Tensor:
        x = self.weight(self.bn(x, batch_stats, member), member)
        for block in self.blocks:
            x = block(x, batch_stats, member)
        # With all members side by side the batch is the last dimension.
        side_by_side = self.weight.members is not None and member is None
        return self.post(x[..., rows] if side_by_side else x[rows], member)


class FlashActor(nn.Module):
    """State-dependent Gaussian before a tanh; returns ``(loc, scale)``, the standard deviation in [e^-10, e^2].

    Args:
        groups: observation groups and widths, concatenated in this order.
        out_features: number of actions.
        hidden_dim: width of the trunk.
        num_blocks: residual blocks.
        expansion: inner width of a block over ``hidden_dim``.

    Source: FlashSAC, arXiv:2604.04539.

    Examples:
        >>> loc, scale = FlashActor({"observation": 17}, 6, hidden_dim=32)(torch.zeros(4, 17))
        >>> loc.shape, scale.shape
        (torch.Size([4, 6]), torch.Size([4, 6]))
    """

    def __init__(
        self,
        groups: Mapping[str, int],
        out_features: int,
        *,
        hidden_dim: int = 128,
        num_blocks: int = 2,
        expansion: int = 4,
    ) -> None:
        super().__init__()
        self.trunk = _Trunk(sum(groups.values()), hidden_dim, num_blocks, None, expansion)
        self.mean, self.std = UnitLinear(hidden_dim, out_features), UnitLinear(hidden_dim, out_features)
        self.mean_bias = nn.Parameter(torch.zeros(out_features))
        self.std_bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, *groups: Tensor, batch_stats: bool = False) -> tuple[Tensor, Tensor]:
        """Maps groups of shape ``(*batch, width)`` to mean and standard deviation ``(*batch, out_features)``.

        Args:
            groups: the observations.
            batch_stats: see ``UnitBatchNorm``; it needs at least two rows.
        """
        x = at_least(concatenate(groups), self.mean_bias)
        rows = x.reshape(-1, x.shape[-1])
        hidden = self.trunk(rows, batch_stats)
        # In the parameters' precision also under autocast: what follows is distribution maths.
        loc, raw = (out.to(self.mean_bias.dtype) for out in (self.mean(hidden), self.std(hidden)))
        log_std = _LOG_STD_MIN + 0.5 * (_LOG_STD_MAX - _LOG_STD_MIN) * (1 + torch.tanh(raw + self.std_bias))
        shape = (*x.shape[:-1], loc.shape[-1])
        return (loc + self.mean_bias).view(shape), log_std.exp().view(shape)


class FlashCritic(nn.Module):
    """Distributional action values of several members, computed together; returns ``(value, log_prob)``.

    Each member predicts probabilities of ``num_bins`` returns, evenly spaced on ``[min_value, max_value]``; the value
    is their mean.

    Args:
        in_features: summed width of the inputs, observation groups and action.
        hidden_dim: width of the trunks.
        num_blocks: residual blocks.
        num_members: independent critics.
        num_bins: bins of the distribution.
        min_value: lowest bin.
        max_value: highest bin.
        expansion: inner width of a block over ``hidden_dim``.

    Source: FlashSAC, arXiv:2604.04539.

    Examples:
        >>> value, log_prob = FlashCritic(20, hidden_dim=16)(torch.zeros(4, 14), torch.zeros(4, 6))
        >>> value.shape, log_prob.shape
        (torch.Size([4, 2]), torch.Size([4, 2, 101]))
    """

    atoms: Tensor

    def __init__(
        self,
        in_features: int,
        *,
        hidden_dim: int = 256,
        num_blocks: int = 2,
        num_members: int = 2,
        num_bins: int = 101,
        min_value: float = -5.0,
        max_value: float = 5.0,
        expansion: int = 4,
    ) -> None:
        super().__init__()
        if num_members < 1 or num_bins < 2 or not -math.inf < min_value < max_value < math.inf:
            raise ValueError(
                f"FlashCritic needs num_members >= 1, num_bins >= 2 and min_value < max_value, got {num_members}, "
                f"{num_bins}, {min_value}, {max_value}."
            )
        self.num_members = num_members
        self.trunk = _Trunk(in_features, hidden_dim, num_blocks, num_members, expansion)
        self.head = UnitLinear(hidden_dim, num_bins, num_members)
        self.head_bias = nn.Parameter(torch.zeros(num_members, num_bins))
        self.register_buffer("atoms", torch.linspace(min_value, max_value, num_bins))

    def forward(self, *inputs: Tensor, batch_stats: bool = False) -> tuple[Tensor, Tensor]:
        """Maps observation groups and action ``(*batch, width)`` to values ``(*batch, members)`` and log-probabilities.

        Args:
            inputs: the observation groups, then the action.
            batch_stats: see ``UnitBatchNorm``; it needs at least two rows.

        Returns:
            Values ``(*batch, members)`` and log-probabilities of the bins ``(*batch, members, bins)``.
        """
        batch = inputs[0].shape[:-1]
        flat = [value.reshape(-1, value.shape[-1]) for value in inputs]
        log_prob = self.logits(*flat, batch_stats=batch_stats).log_softmax(-1).view(*batch, *self.head_bias.shape)
        return self.value(log_prob), log_prob

    def value(self, log_prob: Tensor) -> Tensor:
        """The mean return ``(*batch, members)`` of log-probabilities ``(*batch, members, bins)``."""
        return (log_prob.exp() * self.atoms).sum(-1)

    def logits(self, *inputs: Tensor, batch_stats: bool = False, rows: slice = slice(None)) -> Tensor:
        """Unnormalized log-probabilities ``(batch, members, bins)`` of inputs ``(batch, width)``.

        Args:
            inputs: as for ``forward``.
            batch_stats: as for ``forward``.
            rows: the rows of the output that are wanted; batch statistics are of all rows.
        """
        x, members = at_least(torch.cat(inputs, -1), self.head_bias), range(self.num_members)
        if _side_by_side(x):
            repeated = x.t().expand(self.num_members, -1, -1)
            out = self.head(self.trunk(repeated, batch_stats, rows=rows)).permute(2, 0, 1)
        else:
            out = torch.stack([self.head(self.trunk(x, batch_stats, member, rows), member) for member in members], 1)
        # In the parameters' precision also under autocast: what follows is distribution maths.
        return out.to(self.head_bias.dtype) + self.head_bias


def _side_by_side(x: Tensor) -> bool:
    """Whether members are computed together. It saves kernel launches on a GPU, but overflows the caches of a CPU."""
    return x.device.type != "cpu"


def flash_actor(groups: Mapping[str, int], action_spec: TensorSpec, **network: Any) -> ProbabilisticActor:
    """FlashSAC's actor: a Gaussian squashed by tanh into the box of ``action_spec``; its noise depends on the state.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``; the action is in the environment's units, so the
    actor drives an environment as it is (``action_mode="squash"``).

    Args:
        groups: observation groups and widths, concatenated in this order.
        action_spec: the environment's unbatched action spec; its bounds must be finite and may be asymmetric.
            ``edenrl.envs.bound_actions`` declares some for an environment without.
        network: options of ``FlashActor``: hidden_dim, num_blocks, expansion.

    Raises:
        ValueError: for an action spec that is not a floating-point vector with finite bounds, low < high.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> actor = flash_actor({"policy": 45}, Bounded(-2.0, 1.0, (12,)), hidden_dim=16)
        >>> td = actor(TensorDict(policy=torch.zeros(4, 45), batch_size=[4]))
        >>> bool((td["action"] <= 1).all()), td["action"].shape
        (True, torch.Size([4, 12]))
    """
    if is_one_categorical(action_spec):
        raise ValueError(
            f"FlashSAC needs continuous actions in a box, got {type(action_spec).__name__} of {action_spec.dtype}. "
            "Choose another environment, or an algorithm for discrete actions such as PPO."
        )
    refuse_several_discrete(action_spec)
    # Here, because the squash that `gaussian_actor` would tell about is no choice of FlashSAC's.
    tanh_bounds(
        action_spec,
        "or let algorithm.action_bound_scale declare them where the environment has none, or choose an algorithm "
        "without a tanh, such as PPO",
    )
    return gaussian_actor(groups, action_spec, squash=True, build=FlashActor, **network)


def flash_critic(groups: Mapping[str, int], num_actions: int, **network: Any) -> TensorDictModule:
    """FlashSAC's critic; writes ``state_action_value`` ``(*batch, members)`` and ``value_log_prob``.

    Args:
        groups: observation groups and widths, read in this order, before ``action``.
        num_actions: width of the action, which is expected in [-1, 1].
        network: options of ``FlashCritic``: hidden_dim, num_blocks, num_members, num_bins, min_value, max_value,
            expansion.

    Examples:
        >>> from tensordict import TensorDict
        >>> critic = flash_critic({"critic": 48}, 12, hidden_dim=16)
        >>> critic(TensorDict(critic=torch.zeros(4, 48), action=torch.zeros(4, 12), batch_size=[4])).sorted_keys
        ['action', 'critic', 'state_action_value', 'value_log_prob']
    """
    require_groups("flash_critic", groups)
    net = FlashCritic(sum(groups.values()) + num_actions, **network)
    widths = {**groups, "action": num_actions}
    return GroupModule(net, widths, in_keys=list(widths), out_keys=["state_action_value", "value_log_prob"])
