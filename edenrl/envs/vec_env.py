"""Vector environments in the style of rsl_rl, as TorchRL environments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec, Unbounded

from edenrl.envs.observations import as_groups
from edenrl.envs.random_start import SimulatorClock
from edenrl.envs.self_resetting import InnerStep, SelfResettingEnv, action_spec_of

__all__ = ["REWARD_GROUPS", "VecEnvAdapter"]

_FINAL = ("final_observations", "final_obs", "time_outs_obs")
# Where rsl_rl-style environments keep the groups, and what they are called here.
REWARD_GROUPS = {"rg": "task", "rs": "style", "rp": "penalty"}


class VecEnvAdapter(SimulatorClock, SelfResettingEnv):
    """An rsl_rl-style vector environment (Isaac Lab, mjlab, legged_gym and their kin) as a TorchRL environment.

    The inner environment has ``num_envs``, ``num_actions``, ``device``, ``get_observations()`` and
    ``step(actions) -> (observations, rewards, dones, extras)``, and resets ended rows inside ``step``.

    Observations are groups ``[N, *]``, one root key each: a TensorDict or dict of groups; a lone tensor, which is the
    group ``policy``; or, as older versions do, a tensor with further groups in ``extras["observations"]``, or a tensor
    with a second one for the ``critic`` (``step`` then returns five values). All forms give the same groups. A nested
    entry is a group named by its path, such as ``robot.q``; vectors of integers become float32.

    ``extras["time_outs"]`` (all flags ``[N]`` or ``[N, 1]``, of any dtype) makes a done row ``truncated``, every other
    done row is ``terminated``. ``extras["final_observations"]``, ``["final_obs"]`` or ``["time_outs_obs"]``, in any of
    the forms above and with all ``N`` rows, is the last observation of ended rows; see ``SelfResettingEnv`` for what
    happens without. What is missing is logged once.

    Keys, for ``N`` environments: the groups; ``action`` ``[N, num_actions]``, bounded when the inner environment has a
    Gymnasium box ``single_action_space``; ``("next", "reward")`` ``[N, 1]`` and the three done flags;
    ``("next", "final_obs_missing")`` ``[N, 1]``; ``("next", "metrics", name)`` ``[N, 1]`` for each name in
    ``extras["log"]`` (or ``["episode"]``), the mean that the inner environment reported last, repeated in every row,
    and NaN before the first report; and ``("next", "reward_groups", name)`` ``[N, 1]``: ``task`` from ``extras["rg"]``,
    ``style`` from ``extras["rs"]``, ``penalty`` from ``extras["rp"]``.

    The first ``reset`` hands out the episodes that the inner environment has started by itself, as rsl_rl's runner
    does. Later ones, and rows that are reset before they ended, need ``reset()``, ``reset(env_ids=...)`` or
    ``reset_idx(env_ids)`` of the inner environment or of its ``unwrapped``.

    Training can start at random steps of the first episodes (``RandomStart``) if the inner environment, or its
    ``unwrapped``, has ``max_episode_length`` and an ``episode_length_buf`` that can be set.

    Args:
        env: the inner environment.
        log_keys: names of metrics that the specs declare; default: those in ``env.extras`` (or
            ``env.unwrapped.extras``) now. Others are reported, too, but TorchRL's own collectors drop them, and so do
            the workers of ``edenrl.collectors.make_collector``: list them here for those.
        reward_groups: whether ``extras`` holds reward groups; default: whether ``env.extras`` holds them now.

    Raises:
        TypeError: something that an rsl_rl-style environment has is missing, or has the wrong type.
        ValueError: observations without a row per environment, or that change their shape; values that are not finite.

    Examples:
        >>> from edenrl.envs import PointMass, VecEnvAdapter, as_vec_env
        >>> env = VecEnvAdapter(as_vec_env(PointMass(4, seed=0)))
        >>> env.rollout(3)["observation"].shape
        torch.Size([4, 3, 14])
    """

    _names_option = "log_keys"

    def __init__(self, env: Any, *, log_keys: Sequence[str] | None = None, reward_groups: bool | None = None) -> None:
        needed = ("num_envs", "num_actions", "device", "get_observations", "step")
        if absent := [name for name in needed if not hasattr(env, name)]:
            raise TypeError(
                f"VecEnvAdapter was given a {type(env).__name__} without {', '.join(absent)}; expected an rsl_rl-style "
                f"vector environment with {', '.join(needed)}."
            )
        announced: Mapping[str, Any] = {}
        for owner in (getattr(env, "unwrapped", None), env):
            extras = getattr(owner, "extras", None)
            announced = extras if isinstance(extras, Mapping) else announced
        if log_keys is None:
            log_keys = list(_log_of(announced))
        if reward_groups is None:
            reward_groups = all(name in announced for name in REWARD_GROUPS)
        if hasattr(env, "get_privileged_observations") and callable(getattr(env, "reset", None)):
            env.reset()  # legged_gym and its kin start their first episodes only when the runner asks them to
        observation = _look(env)
        space = getattr(env, "single_action_space", None)
        num_envs, num_actions, device = int(env.num_envs), int(env.num_actions), torch.device(env.device)
        action_spec: TensorSpec = Unbounded((num_envs, num_actions), device=device)
        if isinstance(space, spaces.Box):
            action_spec = action_spec_of(space, num_envs, device)
        super().__init__(
            env,
            _groups(observation, num_envs, type(env).__name__),
            action_spec,
            metrics=log_keys,
            reward_groups=REWARD_GROUPS.values() if reward_groups else (),
        )

    def _simulator(self) -> Any:
        return self.inner

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps taken in the running episodes ``[N]``, as the inner environment counts them; can be set."""
        return self.inner.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        self.inner.episode_length_buf = value

    @property
    def max_episode_length(self) -> int | Tensor:
        """The inner environment's time limit in steps."""
        return self.inner.max_episode_length

    def _inner_step(self, action: Tensor) -> InnerStep:
        observation, *privileged, rewards, dones, extras = self.inner.step(action)
        if not isinstance(extras, Mapping):
            raise TypeError(f"{self._name} returned {extras!r} as extras from step; expected a dict.")
        if privileged:
            observation = (observation, privileged[0])
        elif isinstance(observation, Tensor):
            further = extras.get("observations")
            observation = (observation, {"observations": {} if further is None else further})
        groups = _groups(observation, self.num_envs, self._name)
        done = self._flags("dones", dones)
        if extras.get("time_outs") is not None:
            time_outs = self._flags("extras['time_outs']", extras["time_outs"])
        else:
            time_outs = torch.zeros_like(done)
            # bool(...) copies to the CPU in every step until the first episode has ended, then never again.
            if "time_outs" not in self._said and bool(done.any()):
                self._say(
                    "time_outs",
                    f"{self._name} gives no extras['time_outs']: every end of an episode counts as a termination, and "
                    "none is bootstrapped. If it has a time limit, let it report one.",
                )
        final = next((extras[name] for name in _FINAL if extras.get(name) is not None), None)
        return InnerStep(
            observation=self._check_groups(groups, "step"),
            reward=self._columns("rewards", rewards),
            terminated=done & ~time_outs,
            truncated=done & time_outs,
            final=None if final is None else self._check_groups(_groups(final, self.num_envs, self._name), "final"),
            extra=self._read_extras(extras),
        )

    def _read_extras(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in _log_of(extras).items():
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                value = torch.tensor(value.astype(np.float64))
            if isinstance(value, Tensor) and value.numel():
                self._report(name, value.to(self.device, self._float).mean())
            elif isinstance(value, Real):
                self._report(name, torch.full((), float(value), device=self.device, dtype=self._float))
        if not self._reward_groups:
            if all(name in extras for name in REWARD_GROUPS):
                self._say(
                    "reward_groups",
                    f"{self._name} gives reward groups. Pass VecEnvAdapter(env, reward_groups=True) to see them.",
                )
            return {}
        if absent := [name for name in REWARD_GROUPS if name not in extras]:
            raise ValueError(f"{self._name} gave no extras {absent}; expected all of {list(REWARD_GROUPS)}.")
        groups = {
            group: self._columns(f"extras[{name!r}]", extras[name]).to(self._float).clone()
            for name, group in REWARD_GROUPS.items()
        }
        return {"reward_groups": self._pack(groups)}

    def _inner_reset(self, rows: Tensor | None) -> TensorDict:
        reset = self._reset_call(rows)
        if reset is None:
            what = "all its environments" if rows is None else "environments that have not ended"
            raise RuntimeError(
                f"{self._name} cannot reset {what}: it has none of reset(), reset(env_ids=...), reset_idx(env_ids). "
                "Add one, and remove what ends episodes from outside (StepCounter(max_steps), max_frames_per_traj)."
            )
        result = reset()
        fresh = result is not None
        if not fresh:  # reset_idx only resets
            result = _look(self.inner)
        observation = self._check_groups(_groups(result, self.num_envs, self._name), "reset")
        if not fresh and rows is not None and bool((observation[rows] == self._observation[rows]).all()):
            raise RuntimeError(
                f"{self._name}.get_observations() returns what the last step saw, also after reset_idx(env_ids). Give "
                "it a reset(env_ids=...) that returns the new observations, or remove what ends episodes from outside "
                "(StepCounter(max_steps), max_frames_per_traj)."
            )
        return observation

    def _reset_call(self, rows: Tensor | None) -> Callable[[], Any] | None:
        """The call that resets all rows (None) or some ``[N]``; None when there is no such method."""
        for env in (self.inner, getattr(self.inner, "unwrapped", None)):
            reset, reset_idx = getattr(env, "reset", None), getattr(env, "reset_idx", None)
            if callable(reset) and rows is None:
                return reset
            ids = torch.arange(self.num_envs, device=self.device) if rows is None else rows.nonzero().squeeze(-1)
            if callable(reset) and "env_ids" in inspect.signature(reset).parameters:
                return partial(reset, env_ids=ids)
            if callable(reset_idx):
                return partial(reset_idx, ids)
        return None

    def _set_seed(self, seed: int | None) -> None:
        method = getattr(self.inner, "seed", None)
        if not callable(method):
            self._say("seed", f"{self._name} has no seed(): set_seed changes nothing. Seed it where it is built.")
            return
        method(seed)
        if self._reset_call(None) is not None:
            # The episodes that wait were drawn before the seed.
            self._waiting = torch.zeros_like(self._waiting)


def _look(env: Any) -> Any:
    """Current observations, with those that legged_gym keeps apart."""
    observation, privileged = env.get_observations(), getattr(env, "get_privileged_observations", None)
    return (observation, privileged()) if isinstance(observation, Tensor) and callable(privileged) else observation


def _log_of(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The log by name; a simulator may name its metrics by numbers or tuples."""
    log = extras.get("log", extras.get("episode"))
    return {str(name): value for name, value in log.items()} if isinstance(log, Mapping) else {}


def _groups(observation: Any, num_envs: int, name: str) -> TensorDict:
    """Observation groups ``[N, *]`` from any of the forms that vector environments return."""
    more: Any = None
    if isinstance(observation, tuple) and len(observation) == 2:
        observation, more = observation
    if isinstance(observation, Tensor):
        groups: dict[str, Any] = {"policy": observation}
        if isinstance(more, Tensor):
            groups["critic"] = more
        elif isinstance(more, (Mapping, TensorDictBase)):
            # Beside groups, a plain dict may hold flags [N] and logs.
            further = more["observations"] if "observations" in more.keys() else _wide(more, num_envs)
            groups = {**dict(further.items()), **groups}
    elif isinstance(observation, (Mapping, TensorDictBase)):
        groups = dict(observation.items())
    else:
        raise TypeError(
            f"{name} returned observations of type {type(observation).__name__}; expected a TensorDict or dict of "
            "groups, a tensor, or a tensor with a dict of further groups."
        )
    groups = as_groups(name, groups)
    shapes = {key: tuple(value.shape) for key, value in groups.items()}
    if short := {key: shape for key, shape in shapes.items() if shape[:1] != (num_envs,)}:
        raise ValueError(
            f"{name} returned observations of shape {short}; expected [{num_envs}, ...], one row per environment."
        )
    return TensorDict(groups, batch_size=[num_envs])


def _wide(entries: Mapping[str, Any] | TensorDictBase, num_envs: int) -> dict[str, Tensor]:
    """The entries ``[N, d, ...]``."""
    return {
        key: value
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == num_envs
    }
