"""A differentiable cart-pole swing-up in pure torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from edenrl.envs.tensor_state import TensorStateEnv

__all__ = ["CartPoleSwingUp"]

_DT = 0.02
_GRAVITY = 9.8
_CART_MASS = 1.0
_POLE_MASS = 0.1
_TOTAL_MASS = _CART_MASS + _POLE_MASS
_HALF_LENGTH = 0.5
_FORCE = 10.0
_UPRIGHT_COSINE = 0.95
_HOLD_SECONDS = 2.0


class CartPoleSwingUp(TensorStateEnv):
    """Swing a hanging pole up with a force on its cart, and hold it there; batched, pure torch and differentiable.

    The masses (cart 1.0 kg, pole 0.1 kg), the half length 0.5 m of the pole, ``g = 9.8 m/s^2``, the force of at most
    10 N, ``dt = 0.02 s`` and the equations of motion are those of the classic cart-pole, without friction. One control
    step is one semi-implicit Euler step, with ``theta`` in rad, zero when upright:

    ```
    f     <- 10 clamp(a, -1, 1)
    q     <- (f + 0.05 theta_dot^2 sin theta) / 1.1
    alpha <- (9.8 sin theta - q cos theta) / (0.5 (4/3 - 0.1 cos^2 theta / 1.1))
    x_dot     <- x_dot + dt (q - 0.05 alpha cos theta / 1.1);   x     <- x + dt x_dot
    theta_dot <- theta_dot + dt alpha;                          theta <- theta + dt theta_dot
    ```

    The reward is smooth, at most 1, and there are no walls: a step that ends in ``(x, x_dot, theta, theta_dot)`` pays

    ```
    u = (1 + cos theta) / 2
    reward = u - 0.02 u theta_dot^2 - 0.05 x^2 - 0.005 x_dot^2 - 0.005 a^2
    ```

    The speed of the pole costs by its height: swinging is free below, and standing still at the top is worth more than
    passing through it.

    Nothing terminates; ``truncated`` is "``max_steps`` steps taken". Rows start hanging still: ``theta = pi`` give or
    take 0.5 rad, ``x`` within 0.5 m, velocities within 0.1, all uniform. With probability ``start_anywhere`` a row
    starts with the pole at any angle instead, ``x`` within 1 m, ``x_dot`` within 1 and ``theta_dot`` within 3, so that
    stopping and holding are practised before swinging up works.

    Keys, for ``N`` environments: ``observation`` ``[N, 5]`` = x, x_dot, cos theta, sin theta, theta_dot; ``action``
    ``[N, 1]`` in ``[-1, 1]``, clamped here when it is outside (gradient zero there); ``metrics``, each ``[N, 1]``,
    since the row's last reset, without gradient, zero at reset: ``upright_time`` (seconds with ``cos theta > 0.95``),
    ``hold_time`` (of them, the unbroken ones up to now) and ``success`` (1.0 when ``hold_time`` is 2 s or more).

    Args:
        num_envs: Number of environments ``N``, at least 1.
        device: Device of the states and of the random generator. Default: CPU.
        max_steps: Steps until truncation, at least 1. Default 500, which is 10 s.
        start_anywhere: Probability in [0, 1] of a start at any angle. Default 0: the task as it is judged.
        seed: Seed of the environment's own generator. Default: drawn from torch's global generator.
        dtype: Floating-point type of every entry. Default: ``torch.get_default_dtype()``.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` below 1, or ``start_anywhere`` outside [0, 1].

    Equations of motion: Barto, Sutton and Anderson 1983, in the form corrected by Florian 2007; starts and reward are
    ours.

    Examples:
        >>> import torch
        >>> from edenrl.envs import CartPoleSwingUp
        >>> env = CartPoleSwingUp(num_envs=3, seed=0)
        >>> env.rollout(5)["next", "metrics", "upright_time"].shape
        torch.Size([3, 5, 1])
        >>> action = torch.zeros(3, 1, requires_grad=True)
        >>> env.step(env.reset().set("action", action))["next", "reward"].sum().backward()
        >>> action.grad.shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        max_steps: int = 500,
        start_anywhere: float = 0.0,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(start_anywhere, int | float) or not 0 <= start_anywhere <= 1:
            raise ValueError(
                f"start_anywhere={start_anywhere!r} was given to CartPoleSwingUp; expected a probability in [0, 1]."
            )
        self.start_anywhere = start_anywhere
        super().__init__(num_envs, device=device, max_steps=max_steps, seed=seed, dtype=dtype)

    def _make_specs(self) -> None:
        self._set_specs(1, observation=5, metrics=("upright_time", "hold_time", "success"))

    def _draw_state(self) -> dict[str, Tensor]:
        zero = torch.zeros(self.num_envs, 1, device=self.device, dtype=self._float)
        state = {
            "x": self._uniform(-0.5, 0.5, 1),
            "x_dot": self._uniform(-0.1, 0.1, 1),
            "theta": math.pi + self._uniform(-0.5, 0.5, 1),
            "theta_dot": self._uniform(-0.1, 0.1, 1),
        }
        anywhere = self._uniform(0.0, 1.0, 1) < self.start_anywhere
        for name, extent in (("x", 1.0), ("x_dot", 1.0), ("theta", math.pi), ("theta_dot", 3.0)):
            state[name] = torch.where(anywhere, self._uniform(-extent, extent, 1), state[name])
        return {**state, "upright_steps": zero, "hold_steps": zero.clone(), "steps": self._zero_steps()}

    def _observe(self) -> TensorDict:
        state = self._state
        theta = state["theta"]
        observation = torch.cat([state["x"], state["x_dot"], theta.cos(), theta.sin(), state["theta_dot"]], dim=-1)
        hold_time = state["hold_steps"] * _DT
        metrics = {
            "upright_time": state["upright_steps"] * _DT,
            "hold_time": hold_time,
            "success": (hold_time >= _HOLD_SECONDS - 0.5 * _DT).to(self._float),
        }
        return self._pack({"observation": observation, "metrics": metrics})

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        state = self._state
        action = tensordict.get("action").to(self._float).clamp(-1.0, 1.0)
        sin, cos = state["theta"].sin(), state["theta"].cos()
        pole = _POLE_MASS * _HALF_LENGTH
        push = (_FORCE * action + pole * state["theta_dot"].square() * sin) / _TOTAL_MASS
        inertia = _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cos.square() / _TOTAL_MASS)
        angular = (_GRAVITY * sin - push * cos) / inertia
        x_dot = state["x_dot"] + _DT * (push - pole * angular * cos / _TOTAL_MASS)
        theta_dot = state["theta_dot"] + _DT * angular
        x, theta = state["x"] + _DT * x_dot, state["theta"] + _DT * theta_dot

        height = 0.5 * (1.0 + theta.cos())
        reward = (
            height * (1.0 - 0.02 * theta_dot.square())
            - 0.05 * x.square()
            - 0.005 * x_dot.square()
            - 0.005 * action.square()
        )
        upright = (theta.detach().cos() > _UPRIGHT_COSINE).to(self._float)
        self._state = {
            "x": x,
            "x_dot": x_dot,
            "theta": theta,
            "theta_dot": theta_dot,
            "upright_steps": state["upright_steps"] + upright,
            "hold_steps": (state["hold_steps"] + 1) * upright,
            "steps": state["steps"] + 1,
        }
        return self._observe().set("reward", reward)

    def policy_contract(self) -> dict[str, Any]:
        """What a deployed policy must know, for ``edenrl.export``: terms, force per action, rate."""
        terms = {
            "position of the cart": "m",
            "velocity of the cart": "m/s",
            "cosine of the pole's angle": None,
            "sine of the pole's angle": None,
            "angular velocity of the pole": "rad/s",
        }
        return {
            "observations": {"observation": [{"name": name, "width": 1, "unit": unit} for name, unit in terms.items()]},
            "actions": {
                "clip": True,
                "scale": [_FORCE],
                "bias": [0.0],
                "names": ["cart"],
                "unit": "N",
                "meaning": "force on the cart; the angle is zero when the pole is upright",
            },
            "rate": {"control_dt": _DT, "decimation": 1, "sim_dt": _DT},
        }
