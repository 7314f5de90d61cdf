"""Mean and variance over the samples of every process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["merge_moments", "several_processes"]


def several_processes() -> bool:
    """Whether this process trains together with others, under ``torchrun`` for example.

    Examples:
        >>> several_processes()
        False
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@torch.no_grad()
def merge_moments(count: int, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and population variance over all processes, from each one's own.

    The spread between the processes' means is part of the variance (parallel variance of Chan et al., 1979). In a
    single process the arguments come back. Otherwise every process must call it, with the same shape; one without
    samples passes count 0 and anything finite.

    Args:
        count: number of this process's samples.
        mean: their mean, any shape.
        var: their variance, without Bessel's correction, in the shape of ``mean``.

    Examples:
        >>> merge_moments(2, torch.tensor(1.0), torch.tensor(4.0))
        (tensor(2), tensor(1.), tensor(4.))
    """
    if not several_processes():
        return torch.tensor(count, device=mean.device), mean, var
    own = torch.stack([torch.full_like(mean, count), mean, var]).double()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    counts, means, variances = torch.stack(parts, 1)
    total = counts.sum(0)
    shares = counts / total.clamp_min(1.0)
    merged = (shares * means).sum(0)
    spread = (shares * (variances + (means - merged).square())).sum(0)
    return total.max().long(), merged.to(mean.dtype), spread.to(var.dtype)
