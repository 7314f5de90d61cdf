"""A 2-D tracking task in pure torch whose dynamics differ from episode to episode and cannot be seen."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from edenrl.envs.tensor_state import TensorStateEnv

__all__ = ["HiddenPointMass"]

_DT = 0.05  # s
_DAMPING = 1.0  # kg/s
_MASS = (0.5, 2.0)  # kg
_GAIN = (2.0, 4.0)  # N at full action
_OFFSET = 1.2  # N
_MAX_DELAY = 6  # steps
_RADIUS = 0.5  # m
_TURN_RATE = (0.5, 1.0)  # rad/s
_VELOCITY_NOISE = 0.05  # m/s
_WIDTH = 0.1  # m
_ARENA = 1.0  # m
_PROP, _FRAMES = 8, 10


class HiddenPointMass(TensorStateEnv):
    """A point that must follow a target on a circle, with a mass, gains, offsets and a delay drawn for every episode.

    One control step of ``dt = 0.05`` s, with the action of ``delay`` steps ago, is semi-implicit Euler:

    ```
    v <- v + (gain * clamp(a[t - delay], -1, 1) + offset - 1.0 v) / mass * dt
    p <- clamp(p + v dt, -1, 1)      (v is 0 along an axis that is stopped)
    ```

    Drawn for every episode: ``mass`` in [0.5, 2] kg and the ``gain`` of each axis in [2, 4] N, log-uniform; the
    ``offset`` of each axis, within 1.2 N; a ``delay`` of 0 to 6 steps; the
    target's turn rate, 0.5 to 1 rad/s in either direction, and its first angle. The
    point starts at rest, within 0.2 m of the target along each axis. The reward of a step is
    ``1 / (1 + distance / 0.1)``. Episodes end by truncation only.

    Keys, for ``N`` environments (the groups of RMA):

    | group | shape | content |
    |---|---|---|
    | ``prop`` | ``[N, 8]`` | target less position 2, measured velocity 2 (noise of 0.05 m/s), target's velocity 2, last action 2 |
    | ``priv_explicit`` | ``[N, 2]`` | true velocity |
    | ``priv_latent`` | ``[N, 6]`` | log2 of the mass, log2 of the gains 2, offsets 2, delay / 6 |
    | ``prop_history`` | ``[N, 80]`` | the last 10 frames of prop, oldest first; the first frame of an episode fills it |
    | ``critic`` | ``[N, 16]`` | prop, priv_explicit and priv_latent, also when ``hidden`` |
    | ``metrics`` | | ``tracking_error``, the mean distance in this episode, ``[N, 1]`` |

    Args:
        num_envs: Number of environments ``N``, at least 1.
        device: Device of the states and of the random generator. Default: CPU.
        hidden: Leave ``priv_latent`` and ``prop_history`` zero: an actor then has nothing that tells the parameters. Default False.
        max_steps: Steps until truncation, at least 1. Default 100.
        seed: Seed of the environment's own generator. Default: drawn from torch's global generator.
        dtype: Floating-point type of every entry. Default: ``torch.get_default_dtype()``.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` is not a whole number of at least 1, or ``dtype`` not a floating-point
            type.

    Examples:
        >>> from edenrl.envs import HiddenPointMass
        >>> data = HiddenPointMass(num_envs=3, seed=0).rollout(5)
        >>> data["prop_history"].shape
        torch.Size([3, 5, 80])
    """  # noqa: E501

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        hidden: bool = False,
        max_steps: int = 100,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.hidden = hidden
        super().__init__(num_envs, device=device, max_steps=max_steps, seed=seed, dtype=dtype)

    def _make_specs(self) -> None:
        widths = {"prop": _PROP, "priv_explicit": 2, "priv_latent": 6, "prop_history": _FRAMES * _PROP, "critic": 16}
        self._set_specs(2, **widths, metrics=("tracking_error",))

    def _draw_state(self) -> dict[str, Tensor]:
        either = self._uniform(-1.0, 1.0, 1).sign()
        angle = self._uniform(0.0, 2 * math.pi, 1)
        delay = self._uniform(0.0, 1.0, 1).mul(_MAX_DELAY + 1).floor().clamp(max=_MAX_DELAY)
        zero = torch.zeros(self.num_envs, 2, dtype=self._float, device=self.device)
        state = {
            "mass": self._uniform(math.log(_MASS[0]), math.log(_MASS[1]), 1).exp(),
            "gain": self._uniform(math.log(_GAIN[0]), math.log(_GAIN[1]), 2).exp(),
            "offset": self._uniform(-_OFFSET, _OFFSET, 2),
            "delay": delay.to(torch.int64),
            "turn_rate": self._uniform(*_TURN_RATE, 1) * either,
            "angle": angle,
            "position": _on_circle(angle) + self._uniform(-0.2, 0.2, 2),
            "velocity": zero,
            "actions": zero[:, None].repeat(1, _MAX_DELAY + 1, 1),  # newest first
            "steps": self._zero_steps(),
            "distance": zero[:, :1],
        }
        return state | {"history": self._frame(state)[:, None].repeat(1, _FRAMES, 1)}

    def _frame(self, state: dict[str, Tensor]) -> Tensor:
        """What can be measured, ``[N, 8]``."""
        angle = state["angle"]
        noise = torch.randn(self.num_envs, 2, generator=self._generator, device=self.device, dtype=self._float)
        towards = torch.cat([-angle.sin(), angle.cos()], -1)
        return torch.cat(
            [
                _on_circle(angle) - state["position"],
                state["velocity"] + _VELOCITY_NOISE * noise,
                _RADIUS * state["turn_rate"] * towards,
                state["actions"][:, 0],
            ],
            -1,
        )

    def _observe(self) -> TensorDict:
        """Pack the state into fresh tensors."""
        state = self._state
        delay = state["delay"] / _MAX_DELAY
        latent = torch.cat([state["mass"].log2(), state["gain"].log2(), state["offset"], delay], -1)
        prop, velocity = state["history"][:, -1].clone(), state["velocity"].clone()
        history, shown = state["history"].flatten(1), float(not self.hidden)
        error = state["distance"].detach() / state["steps"].clamp_min(1)
        return self._pack(
            {
                "prop": prop,
                "priv_explicit": velocity,
                "priv_latent": shown * latent,
                "prop_history": shown * history,
                "critic": torch.cat([prop, velocity, latent], -1),
                "metrics": {"tracking_error": error},
            }
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        state = dict(self._state)
        action = tensordict.get("action").to(self._float).clamp(-1.0, 1.0)
        state["actions"] = torch.cat([action[:, None], state["actions"][:, :-1]], 1)
        applied = state["actions"].take_along_dim(state["delay"][..., None], 1).squeeze(1)
        force = state["gain"] * applied + state["offset"] - _DAMPING * state["velocity"]
        state["velocity"] = state["velocity"] + _DT * force / state["mass"]
        free = state["position"] + _DT * state["velocity"]
        state["position"] = free.clamp(-_ARENA, _ARENA)
        state["velocity"] = torch.where(free == state["position"], state["velocity"], 0.0)
        state["angle"] = state["angle"] + _DT * state["turn_rate"]
        distance = torch.linalg.vector_norm(_on_circle(state["angle"]) - state["position"], dim=-1, keepdim=True)
        state["distance"] = state["distance"] + distance
        state["steps"] = state["steps"] + 1
        state["history"] = torch.cat([state["history"][:, 1:], self._frame(state)[:, None]], 1)
        self._state = state
        return self._observe().set("reward", 1.0 / (1.0 + distance / _WIDTH))

    def policy_contract(self) -> dict[str, Any]:
        """What a deployed policy must know, for ``edenrl.export``: terms, layout of the history, actions, rate."""
        prop: list[dict[str, Any]] = [
            {"name": "target less position", "width": 2, "unit": "m"},
            {"name": "measured velocity", "width": 2, "unit": "m/s"},
            {"name": "target's velocity", "width": 2, "unit": "m/s"},
            {"name": "last action", "width": 2, "at_reset": 0.0},
        ]
        return {
            "observations": {"prop": prop, "prop_history": prop},
            "histories": {
                "prop_history": {
                    "frames": _FRAMES,
                    "order": "oldest_first",
                    "at_reset": "repeat",
                    "frame_of": "prop",
                }
            },
            # No scale: how much force an action is differs between episodes, which is the task.
            "actions": {"clip": True, "names": ["x", "y"], "meaning": "force, in units that differ between episodes"},
            "rate": {"control_dt": _DT, "decimation": 1, "sim_dt": _DT},
        }


def _on_circle(angle: Tensor) -> Tensor:
    return _RADIUS * torch.cat([angle.cos(), angle.sin()], -1)
