"""Transforms between a policy and its environment: action clipping and the stack that training uses."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase, RewardScaling, RewardSum, StepCounter, Transform, TransformedEnv

__all__ = ["ActionMode", "ClipAction", "FreshTensors", "action_box", "action_saturation", "wrap_env"]

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


class ClipAction(Transform):
    """Clamp the action to the environment's box on its way in; keep the raw sample in the data.

    A Gaussian policy samples outside the box. Its log-probability belongs to the raw sample, so that is what is stored
    under ``action``; the environment (and whatever it derives from the action, such as a last-action observation) sees
    the clamped one. Seen from outside, the action spec is unbounded, of the same shape and type. Bounds may differ by
    component. The gradient through a clamped component is zero.

    Args:
        in_keys_inv: Action keys to clamp. Default ``["action"]``. One key per transform.

    Raises:
        ValueError: more than one key.
        TypeError: the environment's action spec under that key has no box.

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

    def __init__(self, in_keys_inv: Sequence[NestedKey] | None = None) -> None:
        keys = ["action"] if in_keys_inv is None else list(in_keys_inv)
        if len(keys) != 1:
            raise ValueError(f"ClipAction was given the keys {keys}; expected one. Use one ClipAction per key.")
        super().__init__(in_keys_inv=keys, out_keys_inv=list(keys))
        # Not persistent: they repeat the spec, and loading them elsewhere could contradict it.
        self.register_buffer("low", None, persistent=False)
        self.register_buffer("high", None, persistent=False)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Attach to an environment; bounds of an earlier one are forgotten."""
        self.low = self.high = None
        super().set_container(container)

    def _inv_apply_transform(self, action: Tensor) -> Tensor:
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

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Replace the box by an unbounded spec of the same shape, type and device."""
        leaf = self._bounded(action_spec)
        action_spec[self.in_keys_inv[0]] = Unbounded(leaf.shape, device=leaf.device, dtype=leaf.dtype)
        return action_spec


def action_box(env: EnvBase) -> tuple[Tensor, Tensor] | None:
    """Bounds of the action that the innermost environment accepts.

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
    while isinstance(env, TransformedEnv):
        env = env.base_env
    spec = env.action_spec_unbatched
    if not isinstance(spec, Bounded) or not spec.dtype.is_floating_point:
        return None
    low, high = spec.space.low, spec.space.high
    if not (low.isfinite().any() or high.isfinite().any()):
        return None
    return low.clone(), high.clone()


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


def wrap_env(env: EnvBase, *, action_mode: ActionMode = "clip", reward_scale: float = 1.0) -> TransformedEnv:
    """Add what training reads: clipped actions, episode return and length, scaled rewards.

    Adds ``("next", "episode_reward")`` ``[N, 1]``, the return so far in the environment's own reward, and
    ``("next", "step_count")`` ``[N, 1]``. An environment without the attribute ``returns_fresh_tensors = True`` has its
    output copied, see ``FreshTensors``.

    Args:
        env: The environment.
        action_mode: What happens to actions outside a bounded box. ``"clip"`` (default): ``ClipAction``.
            ``"squash"``: nothing here, the policy's distribution stays inside the box. ``"none"``: nothing, with a
            warning that names the box. Without a box all three are the same.
        reward_scale: Factor on ``("next", "reward")``, applied after the return is counted. Default 1.0.

    Raises:
        ValueError: unknown ``action_mode``, or ``reward_scale`` not finite or zero.

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
    elif box is not None and action_mode == "none":
        warnings.warn(
            f"action_mode='none': actions are passed on as sampled although the environment declares the box "
            f"low={box[0].tolist()}, high={box[1].tolist()}. Use 'clip' or 'squash' to keep them inside.",
            stacklevel=2,
        )
    if not getattr(env, "returns_fresh_tensors", False):
        transforms.insert(0, FreshTensors())
    transforms.append(RewardSum())
    if reward_scale != 1.0:
        transforms.append(RewardScaling(loc=0.0, scale=reward_scale))
    transforms.append(StepCounter())
    wrapped = TransformedEnv(env)
    for transform in transforms:
        wrapped.append_transform(transform)
    return wrapped
