"""How well a critic predicted the returns of a rollout."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["explained_variance"]


@torch.no_grad()
def explained_variance(value: Tensor, target: Tensor) -> Tensor:
    """The share of the variance of the returns that the values explain, ``1 - Var(target - value) / Var(target)``.

    1: the critic predicted the returns exactly; 0: it was no better than their mean; below 0: it was worse. Columns
    (several value heads) count on their own, and the result is their mean. A column of targets that do not vary counts
    as 0: there is nothing to explain. Nothing moves to the host.

    Args:
        value: values at collection, ``[*batch, c]``, such as ``rollout["state_value"]`` after ``GAE``.
        target: value targets of the same shape, such as ``rollout["value_target"]``.

    Returns:
        A scalar tensor.

    Raises:
        ValueError: for values and targets of different shapes.

    Examples:
        >>> returns = torch.tensor([[1.0], [2.0], [3.0]])
        >>> float(explained_variance(returns, returns)), float(explained_variance(torch.zeros(3, 1), returns))
        (1.0, 0.0)
    """
    if value.shape != target.shape:
        raise ValueError(
            f"explained_variance needs values and targets of one shape, got {tuple(value.shape)} and "
            f"{tuple(target.shape)}. Give both as GAE writes them, [*batch, c]."
        )
    # Flat, because a batch may also be a single sample of no dimension.
    target, error = (entry.reshape(-1, target.shape[-1]) for entry in (target, target - value))
    variance, rest = target.var(0, correction=0), error.var(0, correction=0)
    known = variance > torch.finfo(variance.dtype).tiny
    return torch.where(known, 1 - rest / variance.where(known, 1.0), 0.0).mean()
