"""Transforms between a policy and its environment: action clipping and the stack that training uses."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase, RewardScaling, RewardSum, StepCounter, Transform, TransformedEnv

from edenrl.envs.observations import BESIDE_GROUPS, check_group_names
from edenrl.envs.reward_groups import RewardGroups

__all__ = [
    "ActionMode",
    "ClipAction",
    "FillFinalObservation",
    "FreshTensors",
    "action_box",
    "action_saturation",
    "bound_actions",
    "wrap_env",
]

_log = logging.getLogger("edenrl")

ActionMode = Literal["clip", "squash", "none"]


class FreshTensors(Transform):
    """Copies every observation, reward and flag that an environment returns.

    A simulator that writes each step into the same buffers would otherwise overwrite what was already collected,
    without any error. ``wrap_env`` adds it to environments that do not promise fresh tensors
    (``returns_fresh_tensors``).

    Examples:
        >>> from edenrl.envs import FreshTensors, PointMass
        >>> from torchrl.envs import TransformedEnv
        >>> TransformedEnv(PointMass(2, seed=0), FreshTensors()).rollout(3)["observation"].shape
        torch.Size([2, 3, 14])
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.clone()

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset.clone()


class FillFinalObservation(Transform):
    """Puts the observation acted on where a self-resetting simulator hides the last one of an episode.

    TorchRL marks such ``("next", ...)`` entries of ended rows with NaN (Isaac Lab's wrapper does). This transform
    replaces all of the row's entries by those of the step before and sets ``("next", "final_obs_missing")`` ``[N, 1]``
    there, so that a time-out is bootstrapped with V(s_t), as rsl_rl does. NaN in rows that did not end is left for
    ``edenrl.objectives.GAE`` to refuse. Says once that it had to.

    Examples:
        >>> from edenrl.envs import FillFinalObservation, PointMass
        >>> from torchrl.envs import TransformedEnv
        >>> env = TransformedEnv(PointMass(2, seed=0, max_steps=3), FillFinalObservation())
        >>> env.rollout(3)["next", "final_obs_missing"].any()
        tensor(False)
    """

    def __init__(self) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self._said = False
        self._keys: list[NestedKey] = []

    def set_container(self, container: Transform | EnvBase) -> None:
        """Attach to an environment; the keys of an earlier one are forgotten."""
        self._keys = []
        super().set_container(container)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        done = next_tensordict.get("done")
        missing = torch.zeros_like(done)
        if not self._keys:
            assert self.parent is not None
            self._keys = list(self.parent.observation_spec.keys(True, True))
        entries = {key: next_tensordict.get(key) for key in self._keys}
        for entry in entries.values():
            if entry.is_floating_point():
                missing = missing | entry.isnan().reshape(*done.shape[:-1], -1).any(-1, keepdim=True)
        missing = missing & done
        for key, entry in entries.items():
            rows = missing.reshape(*done.shape[:-1], *[1] * (entry.dim() - done.dim() + 1))
            next_tensordict.set(key, torch.where(rows, tensordict.get(key), entry))
        # bool(...) copies to the CPU in every step until the first such episode, then never again.
        if not self._said and bool(missing.any()):
            self._said = True
            _log.warning(
                "The simulator resets itself and does not give the last observation of an episode. The observation "
                "acted on stands in for it: a time-out is bootstrapped with V(s_t) instead of V(s_t+1), as rsl_rl does."
                " ('next', 'final_obs_missing') marks these steps."
            )
        return next_tensordict.set("final_obs_missing", missing)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        assert self.parent is not None
        return tensordict_reset.set("final_obs_missing", self.parent.full_done_spec["done"].zero())

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the mark."""
        shape = (*observation_spec.shape, 1)
        observation_spec["final_obs_missing"] = Binary(1, shape, device=observation_spec.device, dtype=torch.bool)
        return observation_spec


class ClipAction(Transform):
    """Clamp the action to the environment's box, or to a number, on its way in; keep the raw sample in the data.

    A Gaussian policy samples outside the box. Its log-probability belongs to the raw sample, so that is what is stored
    under ``action``; the environment (and whatever it derives from the action, such as a last-action observation) sees
    the clamped one. Seen from outside, the action spec is unbounded, of the same shape and type. Bounds may differ by
    component. The gradient through a clamped component is zero.

    Args:
        in_keys_inv: Action keys to clamp. Default ``["action"]``. One key per transform.
        limit: Clamp every component to ``[-limit, limit]``, whether the environment has a box or not. Default: clamp
            to the environment's box.

    Raises:
        ValueError: more than one key, or a limit that is not a finite number greater than zero.
        TypeError: the environment's action spec under that key has no box or, with ``limit``, is discrete.

    Examples:
        >>> import torch
        >>> from edenrl.envs import ClipAction, PointMass
        >>> from torchrl.envs import TransformedEnv
        >>> env = TransformedEnv(PointMass(1), ClipAction())
        >>> data = env.step(env.reset().set("action", torch.tensor([[7.0, -0.5]])))
        >>> data["action"], data["next", "observation"][:, 6:8]
        (tensor([[ 7.0000, -0.5000]]), tensor([[ 1.0000, -0.5000]]))
    """

    invertible = True
    low: Tensor | None
    high: Tensor | None

    def __init__(self, in_keys_inv: Sequence[NestedKey] | None = None, *, limit: float | None = None) -> None:
        keys = ["action"] if in_keys_inv is None else list(in_keys_inv)
        if len(keys) != 1:
            raise ValueError(f"ClipAction was given the keys {keys}; expected one. Use one ClipAction per key.")
        if limit is not None and not 0 < limit < float("inf"):
            raise ValueError(f"ClipAction was given limit={limit}; expected a finite number greater than zero.")
        super().__init__(in_keys_inv=keys, out_keys_inv=list(keys))
        self.limit = None if limit is None else float(limit)
        # Not persistent: they repeat the spec, and loading them elsewhere could contradict it.
        self.register_buffer("low", None, persistent=False)
        self.register_buffer("high", None, persistent=False)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Attach to an environment; bounds of an earlier one are forgotten."""
        self.low = self.high = None
        super().set_container(container)

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
        if self.limit is not None:
            return action.clamp(-self.limit, self.limit)
        if self.low is None:
            parent = self.parent
            if parent is None:
                raise RuntimeError("ClipAction has no environment to take the box from; use it in a TransformedEnv.")
            leaf = self._bounded(parent.full_action_spec)
            self.low, self.high = leaf.space.low, leaf.space.high
        return action.clamp(self.low, self.high)

    def _bounded(self, full_action_spec: TensorSpec) -> Bounded:
        leaf = full_action_spec[self.in_keys_inv[0]]
        if not isinstance(leaf, Bounded):
            raise TypeError(
                f"ClipAction needs a bounded action spec under {self.in_keys_inv[0]!r}, but the environment has "
                f"{leaf}. Remove ClipAction: there is no box to clip to."
            )
        return leaf

    def _continuous(self, full_action_spec: TensorSpec) -> TensorSpec:
        leaf = full_action_spec[self.in_keys_inv[0]]
        if not _is_continuous(leaf):
            raise TypeError(
                f"ClipAction(limit={self.limit}) clips floating-point numbers, but the environment has {leaf} "
                f"under {self.in_keys_inv[0]!r}. Remove ClipAction."
            )
        return leaf

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Replace the box by an unbounded spec of the same shape, type and device."""
        leaf = self._bounded(action_spec) if self.limit is None else self._continuous(action_spec)
        action_spec[self.in_keys_inv[0]] = Unbounded(leaf.shape, device=leaf.device, dtype=leaf.dtype)
        return action_spec


def action_box(env: EnvBase) -> tuple[Tensor, Tensor] | None:
    """Bounds of the action: those that the innermost environment declares, narrowed by every ``ClipAction(limit=...)``.

    Args:
        env: An environment, transformed or not.

    Returns:
        ``(low, high)``, each ``[a]``, or None when the action is discrete or has no finite bound at all. A box that is
        open on some sides has infinite entries there.

    Examples:
        >>> from edenrl.envs import PointMass, action_box, wrap_env
        >>> action_box(wrap_env(PointMass(3)))
        (tensor([-1., -1.]), tensor([1., 1.]))
    """
    spec = _innermost(env).action_spec_unbatched
    if not _is_continuous(spec):
        return None
    low, high = (torch.full(spec.shape, end, device=spec.device, dtype=spec.dtype) for end in (-torch.inf, torch.inf))
    if isinstance(spec, Bounded):
        low, high = spec.space.low.clone(), spec.space.high.clone()
    for limit in _numeric_clips(env):
        ends = torch.full_like(low, limit)
        low, high = (-ends).clamp(low, high), ends.clamp(low, high)
    if not (low.isfinite().any() or high.isfinite().any()):
        return None
    return low, high


def _is_continuous(spec: TensorSpec) -> bool:
    return isinstance(spec, Bounded | Unbounded) and spec.dtype.is_floating_point


def _numeric_clips(env: EnvBase) -> list[float]:
    """The limits of the numeric clips around an environment."""
    limits = []
    while isinstance(env, TransformedEnv):
        clips = [transform for transform in env.transform.modules() if isinstance(transform, ClipAction)]
        limits += [clip.limit for clip in clips if clip.limit is not None]
        env = env.base_env
    return limits


def bound_actions(env: EnvBase, scale: float) -> EnvBase:
    """Declares the action box ``[-scale, scale]``, in place, where an environment declares no bound at all.

    Policies that end in a tanh need a box, and many simulators (mjlab, most environments in the style of rsl_rl)
    declare none. An environment with any bound keeps its own, and so do discrete actions. Nothing is clipped.

    Args:
        env: An environment, transformed or not.
        scale: Half the width of the box, in the environment's units.

    Returns:
        The same environment.

    Raises:
        ValueError: ``scale`` is not finite or not positive.

    Examples:
        >>> from edenrl.envs import PointMass, action_box, bound_actions
        >>> from torchrl.data import Unbounded
        >>> env = PointMass(3)
        >>> env.action_spec = Unbounded((3, 2))
        >>> action_box(bound_actions(env, 0.5))
        (tensor([-0.5000, -0.5000]), tensor([0.5000, 0.5000]))
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"bound_actions was given scale={scale}; expected a finite number greater than zero.")
    inner = _innermost(env)
    spec = inner.action_spec
    if action_box(inner) is not None or not _is_continuous(spec):
        return env
    specs = inner.full_action_spec.clone()
    specs[inner.action_key] = Bounded(-scale, scale, spec.shape, device=spec.device, dtype=spec.dtype)
    inner.full_action_spec = specs
    outer = env
    while isinstance(outer, TransformedEnv):
        outer.empty_cache()  # it remembers the specs
        outer = outer.base_env
    return env


def _innermost(env: EnvBase) -> EnvBase:
    """The environment inside all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def action_saturation(action: Tensor, box: tuple[Tensor, Tensor]) -> Tensor:
    """Share of action components at or beyond a bound, the metric that shows actions running away.

    A component within a thousandth of the half width counts as at the bound: a tanh only comes close to it.

    Args:
        action: Raw actions ``[*, a]``.
        box: ``(low, high)``, each ``[a]``, as ``action_box`` returns it.

    Returns:
        A scalar in [0, 1].

    Examples:
        >>> import torch
        >>> from edenrl.envs import action_saturation
        >>> box = (torch.tensor([-2.0, -2.0]), torch.tensor([5.0, 5.0]))
        >>> action_saturation(torch.tensor([[0.0, 5.5], [4.0, 1.0]]), box)
        tensor(0.2500)
    """
    low, high = box
    margin = ((high - low) / 2 * 1e-3).nan_to_num(posinf=0.0)  # none where a side is open
    return ((action <= low + margin) | (action >= high - margin)).to(torch.get_default_dtype()).mean()


def wrap_env(
    env: EnvBase,
    *,
    action_mode: ActionMode = "clip",
    clip_actions: float | None = None,
    reward_scale: float = 1.0,
) -> TransformedEnv:
    """Add what training reads: clipped actions, episode return and length, scaled rewards.

    Adds ``("next", "episode_reward")`` ``[N, 1]``, the return so far in the environment's own reward, and
    ``("next", "step_count")`` ``[N, 1]``. An environment without the class attribute ``returns_fresh_tensors = True``
    has its output copied, see ``FreshTensors``. Reward groups are summed and scaled alike, see ``RewardGroups``.

    Args:
        env: The environment.
        action_mode: What happens to actions outside a bounded box. ``"clip"`` (default): ``ClipAction``.
            ``"squash"``: nothing here, the policy's distribution stays inside the box. ``"none"``: nothing, with a
            warning that names the box. Without a box all three are the same.
        clip_actions: Largest magnitude of an action component, in every mode and with or without a box; see
            ``ClipAction(limit=...)``. In the mode "clip" the box is applied after it. Default None, no such clip.
        reward_scale: Factor on ``("next", "reward")`` and its groups, applied after returns are counted. Default 1.0.

    Raises:
        ValueError: unknown ``action_mode``, ``clip_actions`` not finite, not positive, or for a discrete action,
            ``reward_scale`` not finite or zero, or an observation group whose name is taken.

    Examples:
        >>> from edenrl.envs import PointMass, wrap_env
        >>> env = wrap_env(PointMass(2, seed=0), reward_scale=0.1)
        >>> data = env.rollout(3, break_when_any_done=False)
        >>> bool(((data["next", "reward"].sum(1) - 0.1 * data["next", "episode_reward"][:, -1]).abs() < 1e-6).all())
        True
    """
    if action_mode not in ("clip", "squash", "none"):
        raise ValueError(f"action_mode={action_mode!r} was given; expected 'clip', 'squash' or 'none'.")
    if reward_scale == 0 or reward_scale - reward_scale != 0:
        raise ValueError(f"reward_scale={reward_scale} was given; expected a finite number other than zero.")
    box = action_box(env)
    transforms: list[Transform] = []
    if box is not None and action_mode == "clip":
        transforms.append(ClipAction())
    elif box is not None and action_mode == "none" and clip_actions is None:
        warnings.warn(
            f"action_mode='none': actions are passed on as sampled although the environment declares the box "
            f"low={box[0].tolist()}, high={box[1].tolist()}. Use 'clip' or 'squash' to keep them inside.",
            stacklevel=2,
        )
    inner = _innermost(env)
    if clip_actions is not None:
        if not _is_continuous(inner.action_spec):
            raise ValueError(
                f"clip_actions={clip_actions} was given, and {type(inner).__name__} has no continuous action to clip. "
                "Leave it out (--env.clip_actions None)."
            )
        transforms.append(ClipAction(limit=clip_actions))
    # An environment's own private entries stay between it and TorchRL.
    groups = [name for name in env.observation_spec.keys() if name not in BESIDE_GROUPS and not name.startswith("_")]
    check_group_names(type(inner).__name__, groups)
    # Of the class: an instance may pass the question on, as TorchRL's SerialEnv does, to workers that cannot answer.
    if not getattr(type(inner), "returns_fresh_tensors", False):
        transforms.insert(0, FreshTensors())
    transforms.append(RewardSum())
    if "reward_groups" in env.observation_spec.keys():
        transforms.append(RewardGroups(reward_scale))
    if reward_scale != 1.0:
        transforms.append(RewardScaling(loc=0.0, scale=reward_scale))
    transforms.append(StepCounter())
    wrapped = TransformedEnv(env, auto_unwrap=True)
    for transform in transforms:
        wrapped.append_transform(transform)
    return wrapped
