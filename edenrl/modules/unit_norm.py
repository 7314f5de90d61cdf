"""Layers whose weights stay on a sphere, and the projection that brings them back after an optimizer step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from edenrl.modules.moments import several_processes
from edenrl.modules.projection import project_after_steps, unit_rows_

__all__ = [
    "UnitBatchNorm",
    "UnitLinear",
    "UnitRMSNorm",
    "average_batch_statistics",
    "project_unit_norms_",
    "unit_norm_hook",
]

_EPS = 1e-8


def _shape(dim: int, members: int | None) -> tuple[int, ...]:
    return (dim,) if members is None else (members, dim)


class UnitLinear(nn.Module):
    """A linear map without bias whose weight rows are unit vectors; several of them side by side with ``members``.

    Rows start orthogonal. An optimizer step moves them off the sphere, ``project_`` brings them back.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        members: ``None`` maps ``(*batch, in_features)``. A number keeps that many maps, each with its own input.
            Inputs are then ``(members, in_features, batch)``, features before the batch: one product computes all
            members, and the batch norm that follows reads contiguous memory.

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

    def project_(self) -> None:
        """Scales every row to unit norm, in place; a row of zeros stays."""
        unit_rows_(self.weight)


class UnitBatchNorm(nn.Module):
    """Batch norm whose scale and shift together have norm sqrt(dim); ``project_`` restores it after a step.

    Each call says which statistics normalize. They do not depend on ``train()`` or ``eval()``, because a policy must
    act on the running ones also while it is trained. A feature whose batch statistics are not finite leaves its running
    ones as they were.

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
        >>> [round(v, 4) for v in norm.running_mean.tolist()]  # 0.99 of the old mean, 0.01 of the batch's
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> UnitBatchNorm:
        """Keeps the statistics in float32 or better: every cast and move of a module comes through here."""
        exact = self.running_mean, self.running_var
        super()._apply(fn, recurse)
        if torch.promote_types(self.running_mean.dtype, torch.float32) != self.running_mean.dtype:
            self.running_mean, self.running_var = (part.to(self.scale.device) for part in exact)
        return self

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
        dtype = x.dtype
        if scale.dtype != mean.dtype:  # the layer was cast to half precision, which is too small for variances
            rows, scale, shift = (part.to(mean.dtype) for part in (rows, scale, shift))
        before = (mean.clone(), var.clone()) if batch_stats else ()
        out = F.batch_norm(rows, mean, var, scale, shift, batch_stats, self.momentum, self.eps).view(x.shape)
        # A batch that overflows gives a loss that is not finite, whose step is dropped. The statistics would keep it.
        # Through ``data``, as batch_norm itself writes them: a pass that awaits its backward may have read them.
        for statistic, old in zip((mean, var), before, strict=False):
            statistic.data.copy_(torch.where(statistic.isfinite(), statistic, old))
        return out.to(dtype)

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
    for layer in _unit_layers(module):
        layer.project_()


def unit_norm_hook(optimizer: torch.optim.Optimizer, *modules: nn.Module) -> RemovableHandle:
    """Projects every unit layer in ``modules`` after each step of ``optimizer``, whoever calls it.

    Args:
        optimizer: the optimizer of their parameters.
        modules: networks, in TensorDict form or plain.

    Examples:
        >>> net = nn.Sequential(UnitLinear(3, 4), UnitRMSNorm(4))
        >>> handle = unit_norm_hook(torch.optim.SGD(net.parameters(), lr=0.1), net)
    """
    return project_after_steps(optimizer, [layer for module in modules for layer in _unit_layers(module)])


def _unit_layers(module: nn.Module) -> list[UnitLinear | UnitBatchNorm | UnitRMSNorm]:
    return [layer for layer in module.modules() if isinstance(layer, UnitLinear | UnitBatchNorm | UnitRMSNorm)]


@torch.no_grad()
def average_batch_statistics(*modules: nn.Module) -> None:
    """Gives every ``UnitBatchNorm`` the running statistics over all processes that train together.

    Means are averaged. Variances include the spread between the processes' means. In a single process nothing happens.
    Otherwise every process must call this, with the same networks.

    Args:
        modules: networks, in TensorDict form or plain.

    Examples:
        >>> average_batch_statistics(UnitBatchNorm(3))
    """
    norms = [layer for module in modules for layer in module.modules() if isinstance(layer, UnitBatchNorm)]
    if not several_processes() or not norms:
        return
    means = torch.cat([norm.running_mean.flatten() for norm in norms])
    mean_squares = torch.cat([norm.running_var.flatten() for norm in norms]) + means.square()
    both = torch.stack([means, mean_squares]).double()
    dist.all_reduce(both)
    means, mean_squares = both / dist.get_world_size()
    variances = mean_squares - means.square()
    sizes = [norm.running_mean.numel() for norm in norms]
    for norm, mean, var in zip(norms, means.split(sizes), variances.split(sizes), strict=True):
        norm.running_mean.copy_(mean.view_as(norm.running_mean))
        norm.running_var.copy_(var.view_as(norm.running_var))
