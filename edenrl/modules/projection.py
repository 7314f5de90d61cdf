"""What networks with weights on a sphere share, however their layers look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["project_after_steps", "require_sizes", "unit_rows_"]

_EPS = 1e-8  # smallest norm that is divided by


@torch.no_grad()
def unit_rows_(weight: Tensor) -> None:
    """Scales every row (last dimension) to unit norm, in place; a row of zeros stays.

    Examples:
        >>> weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> unit_rows_(weight)
        >>> weight
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    weight.div_(torch.linalg.vector_norm(weight, dim=-1, keepdim=True).clamp_min(_EPS))


class Projected(Protocol):
    """A layer whose parameters stay on a sphere."""

    def project_(self) -> None:
        """Brings them back to it, in place."""


def project_after_steps(optimizer: torch.optim.Optimizer, layers: Sequence[Projected]) -> RemovableHandle:
    """Calls ``project_()`` of every layer after each step of the optimizer; the handle's ``remove()`` ends that."""

    def project(*_: Any) -> None:
        for layer in layers:
            layer.project_()

    return optimizer.register_step_post_hook(project)


def require_sizes(network: str, **sizes: int) -> None:
    """Refuses sizes below 1.

    Raises:
        ValueError: naming the network and the sizes.
    """
    if wrong := {name: size for name, size in sizes.items() if size < 1}:
        raise ValueError(f"{network} needs sizes of at least 1, got {wrong}.")
