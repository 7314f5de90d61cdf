"""A task whose goal and whose style want opposite things, in pure torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from edenrl.envs.tensor_state import TensorStateEnv

__all__ = ["ConflictPointMass"]

_DT = 0.1
_SERVO = 5.0
_RADIUS = 0.6
_GOAL_SPEED = 0.6
_ACTION_RATE = 0.02
_REWARD_GROUPS = ("task", "style", "penalty")
_METRICS = ("goal_distance", "speed")


class ConflictPointMass(TensorStateEnv):
    """A point that should follow a goal on a circle, and move slowly: batched, pure torch, differentiable.

    The action is the position, in m, to which a servo pulls the point. One control step of ``dt = 0.1`` s:

    ```
    a <- clamp(a, -1, 1)
    v <- 5 (a - p)
    p <- p + v dt
    ```

    The goal moves on the circle of radius 0.6 m around the origin at 0.6 m/s, in a direction and from an angle drawn
    for each episode. With ``d`` the distance to it, the reward of a step is the sum of three groups:

    ```
    task    = 1 - (d / 0.6)^2
    style   = -(|v| / 0.6)^2
    penalty = -0.02 |a - a_prev|^2
    ```

    A point that circles with the goal at a share ``s`` of the radius has ``task = 1 - (1 - s)^2`` and ``style = -s^2``:
    following costs style, resting at the origin costs the whole task, and everything between can be had. Keeping 90 %
    of the best task return takes ``s = 0.68``, keeping 70 % ``s = 0.45``.

    Nothing terminates; ``truncated`` is "``max_steps`` steps taken". Rows start at rest, uniformly in
    ``[-0.6, 0.6]^2`` m.

    Keys, for ``N`` environments: ``observation`` ``[N, 10]`` = position 2, velocity 2, goal 2, velocity of the goal 2,
    last (clamped) action 2; ``action`` ``[N, 2]`` in ``[-1, 1]``, clamped here when it is outside (gradient zero
    there); ``reward_groups`` with ``task``, ``style`` and ``penalty``, each ``[N, 1]``, zero at reset; ``metrics`` with
    ``goal_distance`` (m) and ``speed`` (m/s), each ``[N, 1]``, means since the row's last reset, without gradient.

    Args:
        num_envs: Number of environments ``N``, at least 1.
        device: Device of the states and of the random generator. Default: CPU.
        max_steps: Steps until truncation, at least 1. Default 20, which is 2 s.
        seed: Seed of the environment's own generator. Default: drawn from torch's global generator.
        dtype: Floating-point type of every entry. Default: ``torch.get_default_dtype()``.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` is not a whole number of at least 1, or ``dtype`` not a floating-point
            type.

    The task is ours, for constrained PPO (``edenrl.objectives.CMDPLoss``).

    Examples:
        >>> from edenrl.envs import ConflictPointMass
        >>> data = ConflictPointMass(num_envs=3, seed=0).rollout(5)
        >>> data["next", "observation"].shape, data["next", "reward_groups", "style"].shape
        (torch.Size([3, 5, 10]), torch.Size([3, 5, 1]))
    """

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        max_steps: int = 20,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_envs, device=device, max_steps=max_steps, seed=seed, dtype=dtype)

    def _make_specs(self) -> None:
        self._set_specs(2, observation=10, reward_groups=_REWARD_GROUPS, metrics=_METRICS)

    def _draw_state(self) -> dict[str, Tensor]:
        position = self._uniform(-_RADIUS, _RADIUS, 2)
        zero = torch.zeros_like(position)
        turn = (_GOAL_SPEED / _RADIUS) * self._uniform(-1.0, 1.0, 1).sign()
        column = zero[:, :1]
        return {
            "position": position,
            "velocity": zero,
            # What keeps the point where it is.
            "last_action": position.clone(),
            "angle": self._uniform(-math.pi, math.pi, 1),
            "turn": turn,
            "steps": self._zero_steps(),
            **{name: column.clone() for name in (*_REWARD_GROUPS, *_METRICS)},
        }

    def _goal(self) -> tuple[Tensor, Tensor]:
        """Position and velocity of the goal."""
        angle, turn = self._state["angle"], self._state["turn"]
        out = torch.cat([angle.cos(), angle.sin()], -1)
        return _RADIUS * out, _RADIUS * turn * torch.cat([-angle.sin(), angle.cos()], -1)

    def _observe(self) -> TensorDict:
        state = self._state
        parts = [state["position"], state["velocity"], *self._goal(), state["last_action"]]
        return self._pack(
            {
                "observation": torch.cat(parts, -1),
                "reward_groups": {name: state[name].clone() for name in _REWARD_GROUPS},
                "metrics": {name: state[name].detach().clone() for name in _METRICS},
            }
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        state = self._state
        action = tensordict.get("action").to(self._float).clamp(-1.0, 1.0)
        velocity = _SERVO * (action - state["position"])
        position = state["position"] + velocity * _DT
        steps = state["steps"] + 1
        self._state = state = {
            **state,
            "position": position,
            "velocity": velocity,
            "angle": state["angle"] + state["turn"] * _DT,
            "steps": steps,
        }
        offset = (position - self._goal()[0]).square().sum(-1, keepdim=True)
        speed = velocity.square().sum(-1, keepdim=True)
        state["task"] = 1.0 - offset / _RADIUS**2
        state["style"] = -speed / _GOAL_SPEED**2
        state["penalty"] = -_ACTION_RATE * (action - state["last_action"]).square().sum(-1, keepdim=True)
        state["last_action"] = action
        for name, square in (("goal_distance", offset), ("speed", speed)):
            state[name] = state[name] + (square.detach().sqrt() - state[name]) / steps
        return self._observe().set("reward", state["task"] + state["style"] + state["penalty"])

    def policy_contract(self) -> dict[str, Any]:
        """What a deployed policy must know, for ``edenrl.export``: terms, meaning of the action, rate."""
        terms = {"position": "m", "velocity": "m/s", "goal position": "m", "goal velocity": "m/s"}
        last_action = {
            "name": "last action, clamped",
            "width": 2,
            "unit": "m",
            "meaning": "the position itself when an episode begins",
        }
        return {
            "observations": {
                "observation": [
                    *({"name": name, "width": 2, "unit": unit} for name, unit in terms.items()),
                    last_action,
                ]
            },
            "actions": {
                "clip": True,
                "scale": [1.0] * 2,
                "bias": [0.0] * 2,
                "names": ["x", "y"],
                "unit": "m",
                "meaning": f"position to which the point is pulled at {_SERVO:g}/s times its distance",
            },
            "rate": {"control_dt": _DT, "decimation": 1, "sim_dt": _DT},
        }
