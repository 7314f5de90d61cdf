"""A differentiable 2-D reaching task in pure torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from edenrl.envs.tensor_state import TensorStateEnv

__all__ = ["PointMass"]

_DT = 1.0 / 60.0
_DAMPING = 5.0
_FORCE = 5.0
_START_EXTENT = 0.6
_GOAL_EXTENT = 0.7
_OBSTACLE_EXTENT = 0.6
_RADIUS_RANGE = (0.08, 0.15)
_GOAL_CLEARANCE = 0.25
# A candidate misses the clearance with probability at most pi * 0.25^2 / 1.2^2 = 0.14, so eight of them all miss about
# once in 10^7 obstacles; those take the fallback position, which is always clear.
_OBSTACLE_CANDIDATES = 8
_FALLBACK_OFFSET = 0.3
_SUCCESS_DISTANCE = 0.03
_GOAL_WIDTH = 0.05


class PointMass(TensorStateEnv):
    """A point of mass 1 that must reach a goal between two round obstacles; batched, pure torch and differentiable.

    One control step is one semi-implicit Euler step of ``dt = 1/60`` s:

    ```
    a <- clamp(a, -1, 1)
    v <- v (1 - 5 dt) + 5 a dt
    p <- clamp(p + v dt, -1, 1)
    ```

    The reward of a step, with ``dist`` the distance to the goal after it and ``penetration_i = relu(radius_i - distance
    to centre_i)``:

    ```
    -dist + 0.5 exp(-dist^2 / (2 0.05^2)) - 2 sum_i penetration_i^2 - 0.01 |v|^2 - 0.001 |a - a_prev|^2
        + success_bonus * (dist < 0.03)
    ```

    ``terminated`` is ``dist < 0.03``, ``truncated`` is "``max_steps`` steps taken"; one step can set both, and ``done``
    is either. Rows start at rest, the start uniform in ``[-0.6, 0.6]^2`` (lengths in m), the goal in ``[-0.7, 0.7]^2``,
    the obstacle centres in ``[-0.6, 0.6]^2`` at least 0.25 from the goal, their radii in ``[0.08, 0.15]``.

    Keys, for ``N`` environments: ``observation`` ``[N, 14]`` = position 2, velocity 2, goal 2, last (clamped) action 2,
    obstacle centres 4, radii 2; ``action`` ``[N, 2]`` in ``[-1, 1]``, clamped here when it is outside (a clamped
    component has gradient zero); ``metrics`` with ``success`` (1.0 on the step that reaches the goal),
    ``final_distance`` (to the goal, now), ``path_length`` and ``collisions`` (steps with penetration), each ``[N, 1]``,
    since the row's last reset, without gradient, and all zero at reset.

    Reward and next observation keep the autograd path to every action since the last reset of the row or the last
    ``detach_state``; a row that is reset starts without gradient. Nothing here waits for the device.

    Args:
        num_envs: Number of environments ``N``, at least 1.
        device: Device of the states and of the random generator. Default: CPU.
        success_bonus: Reward for reaching the goal. Default 5.0.
        max_steps: Steps until truncation, at least 1. Default 100.
        seed: Seed of the environment's own generator. Default: drawn from torch's global generator, so that
            ``torch.manual_seed`` makes a run repeatable.
        dtype: Floating-point type of every entry. Default: ``torch.get_default_dtype()``.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` is not a whole number of at least 1, ``success_bonus`` not a finite
            number, or ``dtype`` not a floating-point type.

    After the point-mass task of the EmbodiChain differentiable trainer; the obstacle centre range is our choice.

    Examples:
        >>> import torch
        >>> from edenrl.envs import PointMass
        >>> env = PointMass(num_envs=3, seed=0)
        >>> data = env.rollout(5, break_when_any_done=False)
        >>> data["next", "observation"].shape, data["next", "metrics", "path_length"].shape
        (torch.Size([3, 5, 14]), torch.Size([3, 5, 1]))
        >>> action = torch.zeros(3, 2, requires_grad=True)
        >>> state = env.step(env.reset().set("action", action))
        >>> state["next", "reward"].sum().backward()
        >>> action.grad.shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        success_bonus: float = 5.0,
        max_steps: int = 100,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(success_bonus, (int, float)) or not math.isfinite(success_bonus):
            raise ValueError(f"success_bonus={success_bonus!r} was given to PointMass; expected a finite number.")
        super().__init__(num_envs, device=device, max_steps=max_steps, seed=seed, dtype=dtype)
        self.success_bonus = success_bonus

    def _make_specs(self) -> None:
        self._set_specs(2, observation=14, metrics=("success", "final_distance", "path_length", "collisions"))

    def _draw_state(self) -> dict[str, Tensor]:
        """Draw the first state of an episode for every row."""
        position = self._uniform(-_START_EXTENT, _START_EXTENT, 2)
        goal = self._uniform(-_GOAL_EXTENT, _GOAL_EXTENT, 2)
        candidates = self._uniform(-_OBSTACLE_EXTENT, _OBSTACLE_EXTENT, 2, _OBSTACLE_CANDIDATES, 2)
        offset = candidates - goal[:, None, None]
        clear = torch.linalg.vector_norm(offset, dim=-1) >= _GOAL_CLEARANCE
        choice = clear.to(torch.int8).argmax(-1, keepdim=True)
        drawn = candidates.gather(2, choice[..., None].expand(-1, -1, -1, 2)).squeeze(2)
        # Towards the origin, so that the fallback is inside the arena wherever the goal lies.
        fallback = goal - _FALLBACK_OFFSET * torch.where(goal > 0, 1.0, -1.0).to(goal.dtype)
        centres = torch.where(clear.any(-1, keepdim=True), drawn, fallback[:, None])
        zero = torch.zeros_like(position)
        false = torch.zeros(self.num_envs, 1, dtype=torch.bool, device=self.device)
        return {
            "position": position,
            "velocity": zero,
            "goal": goal,
            "last_action": zero.clone(),
            "centres": centres,
            "radii": self._uniform(*_RADIUS_RANGE, 2),
            "steps": self._zero_steps(),
            "success": zero[:, :1].clone(),
            "path_length": zero[:, :1].clone(),
            "collisions": zero[:, :1].clone(),
            "terminated": false,
            "truncated": false.clone(),
        }

    def _observe(self) -> TensorDict:
        """Pack the state into fresh tensors."""
        state = self._state
        observation = torch.cat(
            [
                state["position"],
                state["velocity"],
                state["goal"],
                state["last_action"],
                state["centres"].flatten(1),
                state["radii"],
            ],
            dim=-1,
        )
        distance = torch.linalg.vector_norm(state["position"] - state["goal"], dim=-1, keepdim=True)
        counters = {name: state[name].detach().clone() for name in ("success", "path_length", "collisions")}
        # All metrics are zero at reset, so that a row that has not moved looks the same in every one of them.
        moved = (state["steps"] > 0).to(distance.dtype)
        metrics = {"final_distance": distance.detach() * moved, **counters}
        return self._pack({"observation": observation, "metrics": metrics}, state["terminated"])

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        state = self._state
        action = tensordict.get("action").to(self._float).clamp(-1.0, 1.0)
        velocity = state["velocity"] * (1.0 - _DAMPING * _DT) + _FORCE * _DT * action
        position = (state["position"] + velocity * _DT).clamp(-1.0, 1.0)

        distance = torch.linalg.vector_norm(position - state["goal"], dim=-1, keepdim=True)
        to_centres = torch.linalg.vector_norm(position[:, None] - state["centres"], dim=-1)
        penetration = (state["radii"] - to_centres).relu()
        terminated = distance < _SUCCESS_DISTANCE
        success = terminated.to(self._float)
        reward = (
            -distance
            + 0.5 * torch.exp(-distance.square() / (2.0 * _GOAL_WIDTH**2))
            - 2.0 * penetration.square().sum(-1, keepdim=True)
            - 0.01 * velocity.square().sum(-1, keepdim=True)
            - 0.001 * (action - state["last_action"]).square().sum(-1, keepdim=True)
            + self.success_bonus * success
        )

        steps = state["steps"] + 1
        moved = torch.linalg.vector_norm((position - state["position"]).detach(), dim=-1, keepdim=True)
        collided = (penetration.detach() > 0).any(-1, keepdim=True).to(self._float)
        self._state = {
            **state,
            "position": position,
            "velocity": velocity,
            "last_action": action,
            "steps": steps,
            "success": success,
            "path_length": state["path_length"] + moved,
            "collisions": state["collisions"] + collided,
            "terminated": terminated,
            "truncated": steps >= self.max_steps,
        }
        return self._observe().set("reward", reward)

    def policy_contract(self) -> dict[str, Any]:
        """What a deployed policy must know, for ``edenrl.export``: terms, acceleration per action, rate."""
        terms = {"position": "m", "velocity": "m/s", "goal position": "m"}
        return {
            "observations": {
                "observation": [
                    *({"name": name, "width": 2, "unit": unit} for name, unit in terms.items()),
                    {"name": "last action, clamped", "width": 2, "at_reset": 0.0},
                    {"name": "obstacle centres", "width": 4, "unit": "m"},
                    {"name": "obstacle radii", "width": 2, "unit": "m"},
                ]
            },
            "actions": {
                "clip": True,
                "scale": [_FORCE] * 2,
                "bias": [0.0] * 2,
                "names": ["x", "y"],
                "unit": "m/s^2",
                "meaning": f"acceleration of the point, before damping by {_DAMPING:g}/s times its velocity",
            },
            "rate": {"control_dt": _DT, "decimation": 1, "sim_dt": _DT},
        }
