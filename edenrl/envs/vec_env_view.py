"""TorchRL environments in the style of rsl_rl, for its runners."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import step_mdp

from edenrl.envs.observations import BESIDE_GROUPS
from edenrl.envs.vec_env import REWARD_GROUPS

__all__ = ["as_vec_env"]


def as_vec_env(env: EnvBase, *, max_episode_length: int | None = None) -> Any:
    """An rsl_rl-style view of a TorchRL environment, for rsl_rl's runners and for comparisons with them.

    It has what rsl-rl-lib 5 asks of its ``VecEnv``: ``num_envs``, ``num_actions``, ``max_episode_length``,
    ``episode_length_buf``, ``device``, ``cfg``, ``get_observations() -> TensorDict``, and
    ``step(actions) -> (observations, rewards [N], dones [N] long, extras)``, which resets ended rows. Besides:
    ``reset(env_ids=None)``, ``seed(seed)``, ``close()``, ``single_action_space``, and ``extras``, the last ones.

    ``extras`` holds ``time_outs`` ``[N]`` (truncated and not terminated), ``final_observations`` (the groups of the
    true last observations, valid in ended rows), ``log`` in steps that ended an episode (means of
    ``("next", "metrics")`` over those that ended), and ``rg``, ``rs``, ``rp`` ``[N]`` when the environment publishes
    reward groups.

    Everything it returns is a copy without gradient, and usable outside of inference mode.

    Args:
        env: the environment, batch size ``[N]``, actions ``[N, a]`` of floating-point numbers.
        max_episode_length: steps after which a row is truncated; default: ``max_episode_length`` or ``max_steps`` of
            the environment itself, whose own limit then ends episodes at the same step. ``episode_length_buf`` can be
            set, as rsl_rl does to spread the first time-outs.

    Raises:
        TypeError: ``env`` is no ``EnvBase``, or its actions are not floating-point vectors.
        ValueError: ``env`` has another batch shape, or no time limit is known.

    Examples:
        >>> import torch
        >>> from edenrl.envs import PointMass, as_vec_env
        >>> env = as_vec_env(PointMass(4, seed=0))
        >>> observations, rewards, dones, extras = env.step(torch.zeros(4, 2))
        >>> observations["observation"].shape, rewards.shape, extras["time_outs"].any()
        (torch.Size([4, 14]), torch.Size([4]), tensor(False))
    """
    return _VecEnvView(env, max_episode_length)


class _VecEnvView:
    """What ``as_vec_env`` returns."""

    def __init__(self, env: EnvBase, max_episode_length: int | None) -> None:
        if not isinstance(env, EnvBase):
            raise TypeError(f"as_vec_env was given a {type(env).__name__}; expected a torchrl.envs.EnvBase.")
        if len(env.batch_size) != 1:
            raise ValueError(f"as_vec_env needs an environment of batch size [N], got {list(env.batch_size)}.")
        action = env.action_spec
        if not action.dtype.is_floating_point or len(action.shape) != 2:
            raise TypeError(f"as_vec_env needs actions [N, a] of floating-point numbers, got {action}.")
        core = env
        while isinstance(core, TransformedEnv):
            core = core.base_env
        limit = _find_time_limit(core) if max_episode_length is None else max_episode_length
        if limit is None:
            raise ValueError(
                f"{type(core).__name__} has neither max_episode_length nor max_steps. Pass "
                "as_vec_env(env, max_episode_length=...)."
            )
        self.env, self.num_envs, self.num_actions = env, env.batch_size[0], action.shape[-1]
        self.max_episode_length, self.device = limit, env.device or torch.device("cpu")
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.cfg = {"env": type(core).__name__, "num_envs": self.num_envs, "max_episode_length": int(limit)}
        spec = env.observation_spec
        self._groups = [key for key in spec.keys() if key not in BESIDE_GROUPS]
        self._metrics = self._columns_under("metrics")
        groups = self._columns_under("reward_groups")
        self._reward_groups = {name: group for name, group in REWARD_GROUPS.items() if group in groups}
        low, high = -np.inf, np.inf
        one = env.action_spec_unbatched
        if isinstance(one, Bounded):
            low, high = one.space.low.cpu().numpy(), one.space.high.cpu().numpy()
        self.single_action_space = spaces.Box(low, high, (self.num_actions,))
        zero = torch.zeros(self.num_envs, device=self.device)
        self.extras: dict[str, Any] = {name: zero for name in self._reward_groups}
        if self._metrics:
            self.extras["log"] = dict.fromkeys(self._metrics, 0.0)
        self._root: TensorDictBase | None = None

    def _columns_under(self, name: str) -> list[str]:
        """Names of the entries under a root key that hold one number per row."""
        spec = self.env.observation_spec
        found = spec[name] if name in spec.keys() else {}
        return [key for key, leaf in found.items() if leaf.shape.numel() == self.num_envs] if found else []

    def _observe(self, data: TensorDictBase) -> TensorDict:
        return data.select(*self._groups).clone()

    def _current(self) -> TensorDictBase:
        if self._root is None:
            self._root = self.env.reset()
        return self._root

    def get_observations(self) -> TensorDict:
        with torch.inference_mode(False), torch.no_grad():
            return self._observe(self._current())

    def reset(self, env_ids: Tensor | None = None) -> tuple[TensorDict, dict[str, Any]]:
        with torch.inference_mode(False), torch.no_grad():
            if env_ids is None:
                self._root = self.env.reset()
                self.episode_length_buf = torch.zeros_like(self.episode_length_buf)
            else:
                rows = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
                self._restart(rows.index_fill(0, env_ids.to(self.device), True))
            return self._observe(self._current()), self.extras

    def _restart(self, rows: Tensor) -> None:
        self._root = self.env.reset(self._current().set("_reset", rows.unsqueeze(-1)))
        self.episode_length_buf = self.episode_length_buf * ~rows

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        # rsl_rl steps in inference mode, whose tensors could never enter autograd or be written to afterwards.
        with torch.inference_mode(False), torch.no_grad():
            return self._step(actions.to(self.device).clone())

    def _step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        data = self.env.step(self._current().set(self.env.action_key, actions))
        after = data["next"]
        self.episode_length_buf = self.episode_length_buf + 1
        terminated = after["terminated"].reshape(-1)
        # The buffer was written by the caller, perhaps: its count decides beside the environment's own.
        limit = self.episode_length_buf >= self.max_episode_length
        done = after["done"].reshape(-1) | limit
        extras: dict[str, Any] = {
            "time_outs": done & ~terminated,
            "final_observations": self._observe(after),
            **{name: after["reward_groups", group].reshape(-1).clone() for name, group in self._reward_groups.items()},
        }
        rewards = after["reward"].reshape(-1).clone()
        self._root = step_mdp(data)
        if bool(done.any()):
            if self._metrics:
                values = {name: after["metrics", name].reshape(-1) for name in self._metrics}
                extras["log"] = {name: value[done].float().mean() for name, value in values.items()}
            self._restart(done)
        self.extras = extras
        return self._observe(self._current()), rewards, done.long(), extras

    def seed(self, seed: int) -> int:
        self._root = None
        return self.env.set_seed(seed)

    def close(self) -> None:
        self.env.close(raise_if_closed=False)


def _find_time_limit(env: Any) -> Any:
    """``max_episode_length`` (or ``max_steps``) of an environment, or None."""
    for name in ("max_episode_length", "max_steps"):
        if (limit := getattr(env, name, None)) is not None:
            return limit
    return None
