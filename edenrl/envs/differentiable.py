"""What a differentiable environment offers beyond ``EnvBase``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["DifferentiableEnv", "RolloutPlan", "ScheduledEnv"]


@runtime_checkable
class DifferentiableEnv(Protocol):
    """An ``EnvBase`` whose ``step`` keeps the autograd path from action to reward and next observation.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> isinstance(PointMass(1), DifferentiableEnv)
        True
    """

    def detach_state(self) -> TensorDictBase:
        """Cut the graph at the current state, releasing a tape if there is one; nothing is reset or drawn."""


@dataclass(frozen=True)
class RolloutPlan:
    """One rollout of a scheduled environment.

    Args:
        num_steps: Control steps of the rollout, at least 1.
        objective_scale: Factor on the objective, finite, a number or ``[N]``, one per environment. Default 1.
        metadata: Labels of the rollout, logged as numbers. Default: none.

    Raises:
        ValueError: ``num_steps`` below 1, or an ``objective_scale`` that is NaN or infinite.

    Examples:
        >>> RolloutPlan(num_steps=50, metadata={"level": 2}).objective_scale
        1.0
    """

    num_steps: int
    objective_scale: float | Tensor = 1.0
    metadata: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"RolloutPlan was given num_steps={self.num_steps}; expected at least 1.")
        if not bool(torch.as_tensor(self.objective_scale).isfinite().all()):
            raise ValueError(f"RolloutPlan was given objective_scale={self.objective_scale}; expected finite numbers.")


@runtime_checkable
class ScheduledEnv(Protocol):
    """A differentiable environment that plans each complete rollout before it is reset for it."""

    def prepare_rollout(self, index: int) -> RolloutPlan:
        """Set up rollout number ``index``, counted from 0 over the whole run, and say how long it is.

        What it sets up follows from ``index`` alone, so that a resumed run meets the same rollouts.
        """
