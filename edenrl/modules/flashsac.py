"""FlashSAC networks: unit-norm linear maps, batch norms on a sphere, a distributional critic of several members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchrl.data import TensorSpec
from torchrl.modules import ProbabilisticActor

from edenrl.modules.actor_critic import gaussian_actor
from edenrl.modules.moments import several_processes

__all__ = [
    "FlashActor",
    "FlashCritic",
    "UnitBatchNorm",
    "UnitLinear",
    "UnitRMSNorm",
    "average_batch_statistics",
    "flash_actor",
    "flash_critic",
    "project_unit_norms_",
    "unit_norm_hook",
]

_EPS = 1e-8
_LOG_STD_MIN, _LOG_STD_MAX = -10.0, 2.0


def _shape(dim: int, members: int | None) -> tuple[int, ...]:
    return (dim,) if members is None else (members, dim)


class UnitLinear(nn.Module):
    """A linear map without bias whose weight rows are unit vectors; several of them side by side with ``members``.

    Rows start orthogonal. An optimizer step moves them off the sphere, ``project_`` brings them back.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        members: ``None`` maps ``(*batch, in_features)``. A number keeps that many maps, each with an input of its own:
            features then stand before the batch, ``(members, in_features, batch)``, which makes one product of all of
            them and one contiguous batch norm of what comes out.

    Source: FlashSAC, arXiv:2604.04539.

    Examples:
        >>> UnitLinear(3, 4)(torch.ones(5, 3)).shape, UnitLinear(3, 4, members=2)(torch.ones(2, 3, 5)).shape
        (torch.Size([5, 4]), torch.Size([2, 4, 5]))
        >>> [round(norm, 5) for norm in UnitLinear(3, 2).weight.norm(dim=-1).tolist()]
        [1.0, 1.0]
    """

    def __init__(self, in_features: int, out_features: int, members: int | None = None) -> None:
        super().__init__()
        self.members = members
        self.weight = nn.Parameter(torch.empty(*(() if members is None else (members,)), out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws orthogonal rows (columns, where there are more rows than inputs) of unit norm."""
        for weight in [self.weight] if self.members is None else self.weight:
            nn.init.orthogonal_(weight)
        self.project_()

    def forward(self, x: Tensor, member: int | None = None) -> Tensor:
        """Maps the features; ``member`` is applied alone, to ``(*batch, in_features)``."""
        if self.members is None or member is not None:
            return F.linear(x, self.weight if member is None else self.weight[member])
        return torch.bmm(self.weight, x)

    @torch.no_grad()
    def project_(self) -> None:
        """Scales every row to unit norm, in place; a row of zeros stays."""
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True).clamp_min(_EPS))


class UnitBatchNorm(nn.Module):
    """Batch norm whose scale and shift together have norm sqrt(dim); ``project_`` restores it after a step.

    Which statistics normalize is asked for with each call and does not depend on ``train()`` or ``eval()``: a policy
    that is being trained must act on the running ones.

    Args:
        dim: number of features.
        members: as for ``UnitLinear``; each member has its own scale, shift and statistics.
        momentum: share of a batch in the running statistics.
        eps: added to the variance.

    Source: FlashSAC, arXiv:2604.04539.

    Examples:
        >>> norm = UnitBatchNorm(2)
        >>> x = torch.tensor([[0.0, 2.0], [2.0, 6.0]])
        >>> norm(x, batch_stats=True).round().tolist()
        [[-1.0, -1.0], [1.0, 1.0]]
        >>> [round(v, 4) for v in norm.running_mean.tolist()]  # 0.99 of what it was, 0.01 of the batch's
        [0.01, 0.04]
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, dim: int, members: int | None = None, momentum: float = 0.01, eps: float = 1e-5) -> None:
        super().__init__()
        self.members, self.momentum, self.eps = members, momentum, eps
        shape = _shape(dim, members)
        self.scale = nn.Parameter(torch.ones(shape))
        self.shift = nn.Parameter(torch.zeros(shape))
        self.register_buffer("running_mean", torch.zeros(shape))
        self.register_buffer("running_var", torch.ones(shape))

    def forward(self, x: Tensor, batch_stats: bool = False, member: int | None = None) -> Tensor:
        """Normalizes features in the layout of ``UnitLinear``.

        Args:
            x: the features.
            batch_stats: normalize by the batch and let it move the running statistics; default, the running ones.
            member: apply this one alone.
        """
        affine: list[Tensor] = [self.running_mean, self.running_var, self.scale, self.shift]
        if self.members is None or member is not None:
            rows, affine = x.flatten(0, -2), affine if member is None else [part[member] for part in affine]
        else:
            # All members are the channels of one sample of length ``batch``: no copy and a single kernel.
            rows, affine = x.reshape(1, -1, x.shape[-1]), [part.view(-1) for part in affine]
        mean, var, scale, shift = affine
        return F.batch_norm(rows, mean, var, scale, shift, batch_stats, self.momentum, self.eps).view(x.shape)

    @torch.no_grad()
    def project_(self) -> None:
        """Rescales scale and shift by one factor, in place, so that together they have norm sqrt(dim)."""
        total = self.scale.square().sum(-1, keepdim=True) + self.shift.square().sum(-1, keepdim=True)
        factor = (self.scale.shape[-1] / (total + _EPS)).sqrt_()
        self.scale.mul_(factor)
        self.shift.mul_(factor)


class UnitRMSNorm(nn.Module):
    """Divides features by their root mean square; the scale has norm sqrt(dim), which ``project_`` restores.

    Args:
        dim: number of features.
        members: as for ``UnitLinear``.
        eps: added to the mean square.

    Source: FlashSAC, arXiv:2604.04539.

    Examples:
        >>> [round(v, 3) for v in UnitRMSNorm(2)(torch.tensor([3.0, 4.0])).tolist()]
        [0.849, 1.131]
    """

    def __init__(self, dim: int, members: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.members, self.eps = members, eps
        self.scale = nn.Parameter(torch.ones(_shape(dim, members)))

    def forward(self, x: Tensor, member: int | None = None) -> Tensor:
        """Normalizes features in the layout of ``UnitLinear``; ``member`` is applied alone."""
        dim, scale = -1, self.scale if member is None else self.scale[member]
        if self.members is not None and member is None:
            dim, scale = -2, scale.unsqueeze(-1)
        return x * (x.square().mean(dim, keepdim=True) + self.eps).rsqrt() * scale

    @torch.no_grad()
    def project_(self) -> None:
        """Rescales to norm sqrt(dim), in place."""
        self.scale.mul_((self.scale.shape[-1] / (self.scale.square().sum(-1, keepdim=True) + _EPS)).sqrt_())


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
        sizes = dict(in_features=in_features, hidden_dim=dim, num_blocks=num_blocks, expansion=expansion)
        if wrong := {name: size for name, size in sizes.items() if size < 1}:
            raise ValueError(f"FlashSAC networks need sizes of at least 1, got {wrong}.")
        self.bn, self.weight = UnitBatchNorm(in_features, members), UnitLinear(in_features, dim, members)
        self.blocks = nn.ModuleList(_Block(dim, members, expansion) for _ in range(num_blocks))
        self.post = UnitRMSNorm(dim, members)

    def forward(self, x: Tensor, batch_stats: bool, member: int | None = None, rows: slice = slice(None)) -> Tensor:
        x = self.weight(self.bn(x, batch_stats, member), member)
        for block in self.blocks:
            x = block(x, batch_stats, member)
        return self.post(x[rows] if self.weight.members is None or member is not None else x[..., rows], member)


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
        x = torch.cat(groups, -1) if len(groups) > 1 else groups[0]
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
            rows: those that are wanted; the statistics are of all.
        """
        x, members = torch.cat(inputs, -1), range(self.num_members)
        if _side_by_side(x):
            out = self.head(self.trunk(x.t().expand(self.num_members, -1, -1), batch_stats, rows=rows)).permute(2, 0, 1)
        else:
            out = torch.stack([self.head(self.trunk(x, batch_stats, member, rows), member) for member in members], 1)
        # In the parameters' precision also under autocast: what follows is distribution maths.
        return out.to(self.head_bias.dtype) + self.head_bias


def _side_by_side(x: Tensor) -> bool:
    """Whether members are computed together: what saves launches elsewhere overflows the caches of a CPU."""
    return x.device.type != "cpu"


def project_unit_norms_(module: nn.Module) -> None:
    """Brings weights and norms of every unit layer in ``module`` back to their spheres, in place.

    Examples:
        >>> layer = UnitRMSNorm(4)
        >>> with torch.no_grad():
        ...     _ = layer.scale.mul_(3.0)
        >>> project_unit_norms_(layer)
        >>> layer.scale.tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    for layer in module.modules():
        if isinstance(layer, UnitLinear | UnitBatchNorm | UnitRMSNorm):
            layer.project_()


def unit_norm_hook(optimizer: torch.optim.Optimizer, *modules: nn.Module) -> RemovableHandle:
    """Projects every unit layer in ``modules`` after each step of ``optimizer``, whoever calls it.

    Args:
        optimizer: the optimizer of their parameters.
        modules: networks, in TensorDict form or plain.

    Examples:
        >>> net = FlashCritic(3, hidden_dim=4)
        >>> handle = unit_norm_hook(torch.optim.SGD(net.parameters(), lr=0.1), net)
    """
    layers = [
        part for m in modules for part in m.modules() if isinstance(part, UnitLinear | UnitBatchNorm | UnitRMSNorm)
    ]

    def project(*_: Any) -> None:
        for layer in layers:
            layer.project_()

    return optimizer.register_step_post_hook(project)


@torch.no_grad()
def average_batch_statistics(*modules: nn.Module) -> None:
    """Makes the running statistics of every ``UnitBatchNorm`` those of all processes that train together.

    Means are averaged, variances with the spread between the processes' means. In a single process nothing happens;
    otherwise every process must call it with the same networks.

    Args:
        modules: networks, in TensorDict form or plain.

    Examples:
        >>> average_batch_statistics(UnitBatchNorm(3))
    """
    norms: Iterable[UnitBatchNorm] = [n for m in modules for n in m.modules() if isinstance(n, UnitBatchNorm)]
    if not several_processes() or not norms:
        return
    means = torch.cat([n.running_mean.flatten() for n in norms])
    seconds = torch.cat([n.running_var.flatten() for n in norms]) + means.square()
    both = torch.stack([means, seconds]).double()
    dist.all_reduce(both)
    means, seconds = both / dist.get_world_size()
    variances = seconds - means.square()
    for norm, mean, var in zip(
        norms,
        means.split([n.running_mean.numel() for n in norms]),
        variances.split([n.running_var.numel() for n in norms]),
        strict=True,
    ):
        norm.running_mean.copy_(mean.view_as(norm.running_mean))
        norm.running_var.copy_(var.view_as(norm.running_var))


def flash_actor(groups: Mapping[str, int], action_spec: TensorSpec, **network: Any) -> ProbabilisticActor:
    """FlashSAC's actor: a Gaussian squashed by tanh into the box of ``action_spec``; its noise depends on the state.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``; the action is in the environment's units, so the
    actor drives an environment as it is (``action_mode="squash"``).

    Args:
        groups: observation groups and widths, concatenated in this order.
        action_spec: the environment's unbatched action spec; its bounds must be finite and may be asymmetric.
        network: options of ``FlashActor``: hidden_dim, num_blocks, expansion.

    Raises:
        ValueError: for an action spec that is not a floating-point vector with finite bounds.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Bounded
        >>> actor = flash_actor({"policy": 45}, Bounded(-2.0, 1.0, (12,)), hidden_dim=16)
        >>> td = actor(TensorDict(policy=torch.zeros(4, 45), batch_size=[4]))
        >>> bool((td["action"] <= 1).all()), td["action"].shape
        (True, torch.Size([4, 12]))
    """
    if not action_spec.dtype.is_floating_point:
        raise ValueError(
            f"FlashSAC needs continuous actions in a box, got {type(action_spec).__name__} of {action_spec.dtype}. "
            "Choose another environment, or an algorithm for discrete actions such as PPO."
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
    net = FlashCritic(sum(groups.values()) + num_actions, **network)
    return TensorDictModule(net, in_keys=[*groups, "action"], out_keys=["state_action_value", "value_log_prob"])
