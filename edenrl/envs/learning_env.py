"""Learning environments with Gymnasium's five-value step, whose steps may be differentiable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from edenrl.envs.observations import as_groups, leaf_spaces
from edenrl.envs.self_resetting import InnerStep, SelfResettingEnv, action_spec_of

__all__ = ["DifferentiableVecEnv", "LearningEnvAdapter", "LearningVecEnv", "Observation"]

Observation: TypeAlias = "Tensor | TensorDictBase | Mapping[str, Any]"

_FINAL = ("final_observation", "final_obs")


@runtime_checkable
class LearningVecEnv(Protocol):
    """A batch of environments that resets ended rows inside ``step``, in the style of EmbodiChain's learning envs.

    ``step`` returns the reward and the flags of the transition, but for ended rows the first observation of their next
    episode. Attributes of the shapes: observations ``[num_envs, *]``; reward, terminated, truncated ``[num_envs]``.
    """

    num_envs: int
    device: torch.device
    single_observation_space: spaces.Space
    single_action_space: spaces.Space

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset every row; returns the observation and an info dictionary."""
        ...

    def step(self, action: Tensor) -> tuple[Observation, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Returns observation, reward, terminated, truncated and info."""
        ...


@runtime_checkable
class DifferentiableVecEnv(LearningVecEnv, Protocol):
    """A ``LearningVecEnv`` whose reward and next observation keep the autograd path to the actions."""

    def detach_state(self) -> Observation:
        """Cut the graph at the current state and return its observation; nothing is reset or drawn."""
        ...


class LearningEnvAdapter(SelfResettingEnv):
    """A ``LearningVecEnv`` as a TorchRL environment; gradients pass through it.

    Nothing is detached: reward and ``("next", ...)`` keep the path to every action since the last ``detach_state()`` of
    the row's episode, and a row that was reset carries no gradient into the episode before, as long as the inner
    environment does so.

    Keys, for ``N`` environments: ``observation`` ``[N, *]``, or one root key per entry of a dictionary of observations
    (a nested entry is named by its path, such as ``robot.q``; vectors of integers become float32);
    ``action``, bounded as ``single_action_space`` is; ``("next", "reward")`` ``[N, 1]`` and the three done flags;
    ``("next", "final_obs_missing")`` ``[N, 1]``; ``("next", "metrics", name)`` ``[N, 1]`` for ``info["success"]`` and
    the entries of ``info["metrics"]``, per environment or one number for all. ``info["final_observation"]`` or
    ``info["final_obs"]`` is the last observation of ended rows; see ``SelfResettingEnv`` for what happens without.

    A row can only be reset after it ended, or together with all others.

    Args:
        env: the inner environment.
        seed: passed to the first ``env.reset``, which happens here. Default: the environment's choice.
        metric_keys: names of metrics that the specs declare, ``"success"`` and those in ``info["metrics"]``; default:
            those in the info of the first reset. Others are reported, too, but TorchRL's own collectors drop them, and
            so do the workers of ``edenrl.collectors.make_collector``: list them here for those.

    Raises:
        TypeError: ``env`` lacks part of the protocol, or its actions are not a floating-point box.
        ValueError: observations that do not match ``single_observation_space`` or change; values that are not finite.

    After the learning environments of EmbodiChain.

    Examples:
        >>> import numpy as np, torch
        >>> from gymnasium import spaces
        >>> class Integrator:  # x' = x + a, differentiable, never ends
        ...     num_envs, device = 2, torch.device("cpu")
        ...     single_observation_space = spaces.Box(-np.inf, np.inf, (1,))
        ...     single_action_space = spaces.Box(-1.0, 1.0, (1,))
        ...     def reset(self, *, seed=None, options=None):
        ...         self.x = torch.zeros(2, 1)
        ...         return self.x, {}
        ...     def step(self, action):
        ...         self.x = self.x + action
        ...         never = torch.zeros(2, dtype=torch.bool)
        ...         return self.x, -self.x.square().squeeze(-1), never, never, {}
        >>> env = LearningEnvAdapter(Integrator())
        >>> action = torch.ones(2, 1, requires_grad=True)
        >>> env.step(env.reset().set("action", action))["next", "reward"].sum().backward()
        >>> action.grad.squeeze(-1)
        tensor([-2., -2.])
    """

    _names_option = "metric_keys"

    def __init__(
        self, env: LearningVecEnv, *, seed: int | None = None, metric_keys: Sequence[str] | None = None
    ) -> None:
        needed = ("num_envs", "device", "single_observation_space", "single_action_space", "reset", "step")
        # Not isinstance: from Python 3.12 on it does not see what a wrapper passes on with __getattr__.
        if absent := [name for name in needed if not hasattr(env, name)]:
            raise TypeError(
                f"LearningEnvAdapter was given a {type(env).__name__} without {', '.join(absent)}; expected a "
                f"LearningVecEnv with {', '.join(needed)}."
            )
        observation, info = env.reset(seed=seed)
        groups = _groups(observation, env.num_envs, type(env).__name__)
        _check_space(env.single_observation_space, groups, type(env).__name__)
        if metric_keys is None:
            metric_keys = list(_metrics_of(info))
        self._seed: int | None = None
        super().__init__(
            env,
            groups,
            action_spec_of(env.single_action_space, env.num_envs, torch.device(env.device)),
            metrics=metric_keys,
        )

    def _inner_step(self, action: Tensor) -> InnerStep:
        observation, reward, terminated, truncated, info = self.inner.step(action)
        terminated = self._flags("terminated", terminated)
        final = next((info[name] for name in _FINAL if info.get(name) is not None), None)
        for name, value in _metrics_of(info).items():
            self._take(name, value)
        return InnerStep(
            observation=self._check_groups(_groups(observation, self.num_envs, self._name), "step"),
            reward=self._columns("reward", reward),
            terminated=terminated,
            # A step that reaches the goal at the time limit is terminated and truncated; GAE lets termination win.
            truncated=self._flags("truncated", truncated),
            final=None if final is None else self._check_groups(_groups(final, self.num_envs, self._name), "final"),
        )

    def _take(self, name: str, value: Any) -> None:
        if name not in self._metrics and not isinstance(value, (Tensor, Real)):
            return  # nobody asked for it, and it is no number
        number = torch.as_tensor(value, dtype=self._float, device=self.device)
        self._report(name, number if number.dim() == 0 else self._columns(f"info metric {name!r}", number))

    def _inner_reset(self, rows: Tensor | None) -> TensorDict:
        if rows is not None:
            raise RuntimeError(
                f"{self._name} resets its rows itself when they end; row {int(rows.nonzero()[0])} has not ended. Reset "
                "all rows, and remove what ends episodes from outside (StepCounter(max_steps), max_frames_per_traj)."
            )
        seed, self._seed = self._seed, None
        observation, _ = self.inner.reset(seed=seed)
        return self._check_groups(_groups(observation, self.num_envs, self._name), "reset")

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed
        # The episodes that wait were drawn before the seed.
        self._waiting = torch.zeros_like(self._waiting)

    def detach_state(self) -> TensorDict:
        """Cut the autograd graph at the current state.

        Returns:
            The current root TensorDict, without gradient: observations and done flags.

        Raises:
            TypeError: the inner environment is not a ``DifferentiableVecEnv``.
        """
        if not callable(getattr(self.inner, "detach_state", None)):
            raise TypeError(f"{self._name} has no detach_state(): it is not a DifferentiableVecEnv.")
        observation = _groups(self.inner.detach_state(), self.num_envs, self._name)
        self._observation = self._check_groups(observation, "detach_state").detach().clone()
        self._metrics = {name: value.detach() for name, value in self._metrics.items()}
        return self._observation.clone().update(self.done_spec.zero())


def _metrics_of(info: Mapping[str, Any]) -> dict[str, Any]:
    success = {"success": info["success"]} if "success" in info else {}
    metrics = {str(name): value for name, value in dict(info.get("metrics") or {}).items()}
    return {**metrics, **success}


def _groups(observation: Any, num_envs: int, name: str) -> TensorDict:
    if isinstance(observation, Tensor):
        observation = {"observation": observation}
    if not isinstance(observation, (Mapping, TensorDictBase)):
        raise TypeError(
            f"{name} returned an observation of type {type(observation).__name__}; expected a tensor, a TensorDict or "
            "a dict of tensors."
        )
    return TensorDict(as_groups(name, observation), batch_size=[num_envs])


def _check_space(space: spaces.Space, groups: TensorDict, name: str) -> None:
    """The declared space and the first observation must agree: networks are built from one, fed with the other."""
    declared = {"observation": space}
    if isinstance(space, spaces.Dict):
        declared = {key: leaf for key, (_, leaf) in leaf_spaces(name, space).items()}
    expected = {key: tuple(leaf.shape or ()) for key, leaf in declared.items()}
    found = {key: tuple(leaf.shape[1:]) for key, leaf in groups.items()}
    if found != expected:
        raise ValueError(f"{name} declares observations of shape {expected} for each environment, but gave {found}.")
