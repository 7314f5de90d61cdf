"""What environments that reset themselves inside ``step`` have in common."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from edenrl.envs.observations import check_group_names

__all__ = ["InnerStep", "SelfResettingEnv", "action_spec_of", "warn_once", "where_rows"]

_log = logging.getLogger("edenrl")


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, once per process: a run builds an environment for every evaluation."""
    _log.warning("%s", message)


def where_rows(rows: Tensor, chosen: TensorDictBase, other: TensorDictBase) -> TensorDict:
    """``chosen`` in the rows ``[N, 1]`` that are true, ``other`` elsewhere; copies, with gradient to both."""

    def select(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(rows.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    return chosen.apply(select, other)


def action_spec_of(space: spaces.Space, num_envs: int, device: torch.device) -> TensorSpec:
    """The spec of a batch of actions from the space of one: a box without any finite bound is unbounded."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(f"The action space is {space}; expected a Box of floating-point actions.")
    shape = (num_envs, *space.shape)
    dtype = torch.float64 if space.dtype == np.float64 else torch.float32
    if not (np.isfinite(space.low).any() or np.isfinite(space.high).any()):
        return Unbounded(shape, device=device, dtype=dtype)
    low, high = (torch.tensor(bound, dtype=dtype, device=device).expand(shape) for bound in (space.low, space.high))
    return Bounded(low, high, shape, device=device, dtype=dtype)


@dataclass
class InnerStep:
    """What one step of the wrapped environment said, as ``SelfResettingEnv`` wants to hear it."""

    observation: TensorDict
    """Groups ``[N, *]``; ended rows already hold the first observation of their next episode."""
    reward: Tensor
    """``[N, 1]``."""
    terminated: Tensor
    """``[N, 1]`` bool."""
    truncated: Tensor
    """``[N, 1]`` bool."""
    final: TensorDict | None = None
    """Groups ``[N, *]`` whose ended rows hold the last observation of their episode; None: not known."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further entries of ``("next", ...)``."""


class SelfResettingEnv(EnvBase):
    """Turns an environment that resets ended rows inside ``step`` into one that TorchRL resets.

    ``("next", ...)`` of an ended row is the last observation of its episode. The observation that came in its place,
    the first of the next episode, is kept and handed out when TorchRL resets the row. Where the last observation is not
    known, the one acted on stands in for it and ``("next", "final_obs_missing")`` is true, so that a time-out is
    bootstrapped with V(s_t).

    Subclasses implement ``_inner_step``, ``_inner_reset`` and ``_set_seed``.

    Args:
        inner: the wrapped environment.
        observation: its current observation, groups ``[N, *]``; all rows at the start of an episode.
        action_spec: spec of the batch of actions.
        metrics: names under ``("next", "metrics")``, each ``[N, 1]``; NaN until they are first reported. Others that
            the inner environment reports are kept by ``recorded_metrics``, because TorchRL drops what no spec declares.
        reward_groups: names under ``("next", "reward_groups")``, each ``[N, 1]``.

    Raises:
        ValueError: observations without a row per environment, a group whose name is taken, values that are not finite.

    Examples:
        >>> from edenrl.envs import PointMass, VecEnvAdapter, as_vec_env
        >>> env = VecEnvAdapter(as_vec_env(PointMass(2, seed=0, max_steps=3)))
        >>> env.final_obs
        'unknown'
        >>> data = env.rollout(4, break_when_any_done=False)
        >>> env.final_obs, data["next", "truncated"][0].squeeze(-1).tolist()
        ('given', [False, False, True, False])
    """

    returns_fresh_tensors = True
    _names_option = "metrics"

    def __init__(
        self,
        inner: Any,
        observation: TensorDict,
        action_spec: TensorSpec,
        *,
        metrics: Iterable[str] = (),
        reward_groups: Iterable[str] = (),
    ) -> None:
        device, num_envs = torch.device(inner.device), int(inner.num_envs)
        super().__init__(device=device, batch_size=[num_envs])
        self.num_envs = num_envs
        # Past nn.Module: an inner module must not become part of the adapter's state_dict.
        object.__setattr__(self, "inner", inner)
        self.is_closed = False
        check_group_names(self._name, observation.keys())
        self._shapes = {key: tuple(leaf.shape) for key, leaf in observation.items(True, True)}
        if wrong := {key: shape for key, shape in self._shapes.items() if shape[:1] != (num_envs,) or len(shape) < 2}:
            raise ValueError(
                f"{self._name} has observations of shape {wrong}; expected [{num_envs}, ...], one row per environment."
            )
        double = any(leaf.dtype == torch.float64 for leaf in observation.values(True, True))
        self._float = torch.float64 if double else torch.float32
        # Not zero: an episode that ended before the first report says nothing about the metric.
        self._metrics = {str(name): torch.full((), torch.nan, device=device, dtype=self._float) for name in metrics}
        self._unannounced: dict[str, Tensor] = {}
        self._recording: list[dict[str, Tensor]] | None = None
        self._reward_groups = tuple(reward_groups)
        self._make_specs(observation, action_spec)
        self._said: set[str] = set()
        self._final_obs: Literal["unknown", "given", "missing"] = "unknown"
        self._observation = observation.detach().to(device).clone()
        self._waiting = torch.ones(num_envs, 1, dtype=torch.bool, device=device)
        self._nonfinite: dict[Any, Tensor] = {}
        self._looking_is_free = device.type == "cpu"
        self._refuse_nonfinite(self._observation)

    @property
    def _name(self) -> str:
        return type(self.inner).__name__

    @property
    def final_obs(self) -> Literal["unknown", "given", "missing"]:
        """Whether the inner environment gives the last observation of its episodes; unknown until the first ended."""
        return self._final_obs

    def _make_specs(self, observation: TensorDict, action_spec: TensorSpec) -> None:
        shape, device = self.batch_size, self.device

        def column() -> Unbounded:
            return Unbounded((*shape, 1), device=device, dtype=self._float)

        def flag() -> Binary:
            return Binary(1, shape=(*shape, 1), device=device, dtype=torch.bool)

        groups = {key: Unbounded(value.shape, device=device, dtype=value.dtype) for key, value in observation.items()}
        self.observation_spec = Composite(groups, shape=shape, device=device)
        for name, keys in (("metrics", self._metrics), ("reward_groups", self._reward_groups)):
            if keys:
                self.observation_spec[name] = Composite({key: column() for key in keys}, shape=shape, device=device)
        self.observation_spec["final_obs_missing"] = flag()
        self.action_spec = action_spec
        self.reward_spec = column()
        self.done_spec = Composite(done=flag(), terminated=flag(), truncated=flag(), shape=shape, device=device)

    # ---- what a subclass provides ----------------------------------------------------------------------------------

    @abstractmethod
    def _inner_step(self, action: Tensor) -> InnerStep:
        """Step the wrapped environment."""

    @abstractmethod
    def _inner_reset(self, rows: Tensor | None) -> TensorDict:
        """Reset all rows (None) or the rows ``[N]`` and return the groups of all."""

    # ---- TorchRL's side --------------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        # A simulator may clip or scale the action in place; the one in the data is what the policy sampled.
        inner = self._inner_step(tensordict.get("action").clone())
        done = inner.terminated | inner.truncated
        final, missing = self._final(inner.final, done)
        reward = inner.reward.to(self._float)
        out = where_rows(done, final, inner.observation)
        self._refuse_nonfinite(out, inner.observation, {"reward": reward})
        self._observation = inner.observation.clone()
        self._waiting = done.clone()
        out.update({"reward": reward.clone(), "done": done, "final_obs_missing": missing, **inner.extra})
        out.update({"terminated": inner.terminated.clone(), "truncated": inner.truncated.clone()})
        if self._metrics:
            # One number for the whole batch is repeated in every row: the log averages over the rows that ended.
            out["metrics"] = self._pack({name: self._rows(value).clone() for name, value in self._metrics.items()})
        if self._recording is not None:
            self._recording.append({name: self._rows(value) for name, value in self._unannounced.items()})
        elif self._unannounced:
            self._say(
                "metrics",
                f"{self._name} reports the metrics {sorted(self._unannounced)}, which it did not announce when it was "
                f"wrapped. This collector drops them. Pass {type(self).__name__}(env, {self._names_option}=[...]) to "
                "see them.",
            )
        return out

    def _report(self, name: str, value: Tensor) -> None:
        """Take a metric, one number for all rows or ``[N, 1]``; it holds until the next report."""
        held = self._metrics if name in self._metrics else self._unannounced
        held[name] = value.detach().clone()

    def _rows(self, value: Tensor) -> Tensor:
        return value.reshape(-1, 1).expand(self.num_envs, 1)

    def _final(self, final: TensorDict | None, done: Tensor) -> tuple[TensorDict, Tensor]:
        """The last observations, and which ended rows lack theirs."""
        if final is not None:
            present = set(final.keys(True, True))
            absent = [key for key in self._shapes if key not in present]
            self._final_obs = "given" if not absent else self._final_obs
            if not absent:
                return final, torch.zeros_like(done)
            text = f"{self._name} gives no last observation of {absent}; the one acted on stands in for it."
            self._say("final", text)
            return self._observation.clone(False).update(final), done.clone()
        # Where looking costs something, only until the first episode has ended.
        unsure = self._final_obs == "unknown" or (self._final_obs == "given" and self._looking_is_free)
        if unsure and bool(done.any()):
            self._final_obs = "missing"
            self._say(
                "final",
                f"{self._name} resets itself and does not give the last observation of an episode. The observation "
                "acted on stands in for it: a time-out is bootstrapped with V(s_t) instead of V(s_t+1), as rsl_rl "
                "does. ('next', 'final_obs_missing') marks these steps.",
            )
        return self._observation, done.clone()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        self._raise_if_nonfinite()
        asked = None if tensordict is None else tensordict.get("_reset", None)
        rows = torch.ones_like(self._waiting) if asked is None else asked.reshape(self.num_envs, 1)
        if bool((stale := rows & ~self._waiting).any()):
            # Together with all others a row can always be reset, also when some of these wait.
            if bool(rows.all()):
                self._observation = self._inner_reset(None).clone()
            else:
                fresh = self._inner_reset(stale.squeeze(-1))
                self._observation = where_rows(stale, fresh, self._observation)
        self._waiting = self._waiting & ~rows
        self._refuse_nonfinite(self._observation)
        out = self._observation.clone()
        for name, keys in (("metrics", self._metrics), ("reward_groups", self._reward_groups)):
            if keys:
                out[name] = self._pack({key: self.reward_spec.zero() for key in keys})
        return out.update(self.done_spec.zero()).set("final_obs_missing", torch.zeros_like(rows))

    def _pack(self, entries: Mapping[Any, Any]) -> TensorDict:
        return TensorDict(dict(entries), batch_size=self.batch_size, device=self.device)

    def _columns(self, name: str, value: Any, owner: str = "step") -> Tensor:
        """A tensor ``[N]`` or ``[N, 1]`` as ``[N, 1]``."""
        expected = (self.num_envs,)
        if not isinstance(value, Tensor) or tuple(value.shape) not in (expected, (*expected, 1)):
            given = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TypeError(
                f"{self._name} returned {name}={given} from {owner}; expected a tensor of shape {expected}, one value "
                "per environment."
            )
        return value.to(self.device).reshape(self.num_envs, 1)

    def _flags(self, name: str, value: Any) -> Tensor:
        columns = self._columns(name, value)
        return columns if columns.dtype == torch.bool else columns != 0

    def _check_groups(self, observation: TensorDictBase, owner: str) -> TensorDict:
        """Refuses groups that differ from those of the first observation; final ones may lack some."""
        found = {key: tuple(leaf.shape) for key, leaf in observation.items(True, True)}
        expected = self._shapes
        if owner == "final":
            expected = {key: expected[key] for key in found if key in expected}
        if found != expected:
            raise ValueError(
                f"{self._name} returned {owner} observations {found}; expected {expected}, as at construction."
            )
        return observation.to(self.device)

    def _say(self, topic: str, message: str) -> None:
        """Warn once about each topic."""
        if topic not in self._said:
            self._said.add(topic)
            warn_once(message)

    def _refuse_nonfinite(self, *data: Mapping[Any, Any] | TensorDictBase) -> None:
        """Marks rows that are not finite, on the device. Raises at once only where reading the marks costs nothing."""
        for entries in data:
            leaves = entries.items(True, True) if isinstance(entries, TensorDictBase) else entries.items()
            for key, leaf in leaves:
                if leaf.is_floating_point():
                    bad = (~leaf.detach().reshape(self.num_envs, -1).isfinite()).any(-1)
                    self._nonfinite[key] = self._nonfinite.get(key, False) | bad
        if self._looking_is_free:
            self._raise_if_nonfinite()

    def _raise_if_nonfinite(self) -> None:
        found, self._nonfinite = self._nonfinite, {}
        if not found or not bool(torch.stack(list(found.values())).any()):
            return
        counts = {key: int(bad.sum()) for key, bad in found.items() if bool(bad.any())}
        first = next(int(bad.nonzero()[0]) for bad in found.values() if bool(bad.any()))
        text = ", ".join(f"{key!r} in {count} of {self.num_envs} environments" for key, count in counts.items())
        raise ValueError(
            f"{self._name} returned values that are not finite: {text} (the first is environment {first}). Fix the "
            "environment, or terminate a state that diverges before its observation is returned."
        )

    def to(self, device: torch.device | str | int) -> SelfResettingEnv:
        """Refuses to move: the inner environment stays where it is."""
        target = torch.empty(0, device=device).device
        if target.type != self.device.type or None not in (target.index, self.device.index) and target != self.device:
            raise RuntimeError(
                f"{self._name} runs on {self.device} and cannot be moved to {device}. Build it there, or append "
                "TorchRL's DeviceCastTransform."
            )
        return self

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the inner environment, if it can be."""
        if not self.is_closed and callable(close := getattr(self.inner, "close", None)):
            close()
        super().close(raise_if_closed=raise_if_closed)
