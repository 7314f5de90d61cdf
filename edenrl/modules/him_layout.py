"""Where frames and velocity stand in the observations that the hybrid internal model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase

from edenrl.modules.actor_critic import observation_groups, vector_groups

__all__ = ["VELOCITY", "HIMLayout", "HIMRolloutCheck"]

VELOCITY = 3
"""Entries of the linear velocity."""

_ORDERS = ("oldest_first", "newest_first")
# Noise may make the actor's frame differ from the critic's, by this share of the variance of the critic's.
_LARGEST_ERROR = 0.25


@dataclass(frozen=True)
class HIMLayout:
    """Where the current frame stands in a stack of frames, and the true velocity in the critic's observation.

    The history holds ``frames`` frames of width ``frame``. The critic's observation holds one frame and the linear
    velocity of the trunk, 3 entries.

    Args:
        frame: width of a frame.
        frames: how many are stacked.
        order: "oldest_first" (as TorchRL's ``CatFrames`` stacks) or "newest_first" (as HIMLoco does).
        velocity: first entry of the velocity in the critic's observation; the others, in their order, are the frame.
            Default: the last three.

    Raises:
        ValueError: for a number out of range or another order.

    Examples:
        >>> layout = HIMLayout(frame=2, frames=3, order="oldest_first")
        >>> layout.current(torch.arange(6.0)), layout.velocity_of(torch.arange(5.0))
        (tensor([4., 5.]), tensor([2., 3., 4.]))
    """

    frame: int
    frames: int
    order: Literal["oldest_first", "newest_first"]
    velocity: int | None = None

    def __post_init__(self) -> None:
        if self.frame < 1 or self.frames < 1 or self.order not in _ORDERS:
            raise ValueError(
                f"A layout needs frame and frames of at least 1 and order {' or '.join(map(repr, _ORDERS))}, got "
                f"{self.frame}, {self.frames} and {self.order!r}."
            )
        if self.velocity is not None and not 0 <= self.velocity <= self.frame:
            raise ValueError(
                f"velocity={self.velocity} was given; in a critic's observation of {self.frame + VELOCITY} entries "
                f"the {VELOCITY} of the velocity begin between 0 and {self.frame}."
            )

    @classmethod
    def of(
        cls,
        env: EnvBase,
        history: str = "history",
        critic: str = "critic",
        order: Literal["oldest_first", "newest_first"] | None = None,
    ) -> HIMLayout:
        """The layout of an environment's groups.

        Args:
            env: publishes both groups. Its attribute ``history_layout`` is the order of the stack. Its attribute
                ``critic_layout``, pairs of name and width, shows where the critic's ``"linear_velocity"`` stands;
                without it the velocity is last.
            history: the group of stacked frames.
            critic: the group of one frame and the velocity.
            order: for an environment that does not declare it.

        Raises:
            ValueError: widths that do not fit, no order or one that the environment contradicts, no velocity.

        Examples:
            >>> from edenrl.envs import Quadruped
            >>> HIMLayout.of(Quadruped(1, groups=("history", "critic"), num_threads=1))
            HIMLayout(frame=45, frames=6, order='oldest_first', velocity=45)
        """
        if lacking := [group for group in (history, critic) if group not in env.observation_spec.keys()]:
            raise ValueError(
                f"HIM reads a stack of frames, {history!r}, and one frame with the linear velocity, {critic!r}, and "
                f"{lacking} are missing. Groups of this environment: {vector_groups(env.observation_spec)}. "
                'Publish them (the quadruped: env.kwargs.groups, such as ["history", "critic"]), or name others in '
                "actor_groups and critic_groups."
            )
        widths = observation_groups(env.observation_spec, [history, critic])
        frame = widths[critic] - VELOCITY
        if frame < 1 or widths[history] % frame:
            raise ValueError(
                f"{history!r} has {widths[history]} entries and {critic!r} {widths[critic]}: the history must hold "
                f"whole frames of {widths[critic]} - {VELOCITY} = {frame} entries, no multiple of which is "
                f"{widths[history]}. Publish the same frame in both, and in {critic!r} the linear velocity beside it."
            )
        declared: Literal["oldest_first", "newest_first"] | None = getattr(env, "history_layout", None)
        found = order if declared is None else declared
        if found is None:
            raise ValueError(
                f"Nothing says in which order {history!r} is stacked: set history_layout to 'oldest_first' (as "
                "CatFrames) or 'newest_first', or declare it as the environment's attribute history_layout."
            )
        if declared is not None and order not in (None, declared):
            raise ValueError(
                f"history_layout={order!r} was given, but the environment declares {declared!r}: leave it out."
            )
        return cls(frame, widths[history] // frame, found, _velocity_start(env, critic, widths[critic]))

    @property
    def history_width(self) -> int:
        """Entries of the stack."""
        return self.frame * self.frames

    def current(self, history: Tensor) -> Tensor:
        """The newest frame of a stack, ``(*batch, frame)``."""
        return history[..., -self.frame :] if self.order == "oldest_first" else history[..., : self.frame]

    def oldest_first(self, history: Tensor) -> Tensor:
        """The stack with its oldest frame first, ``(*batch, frames * frame)``."""
        if self.order == "oldest_first":
            return history
        return history.unflatten(-1, (self.frames, self.frame)).flip(-2).flatten(-2)

    def velocity_of(self, critic: Tensor) -> Tensor:
        """The true velocity in a critic's observation, ``(*batch, 3)``, in the environment's scale."""
        start = self.frame if self.velocity is None else self.velocity
        return critic[..., start : start + VELOCITY]

    def frame_of(self, critic: Tensor) -> Tensor:
        """The frame in a critic's observation, ``(*batch, frame)``."""
        start = self.frame if self.velocity is None else self.velocity
        return torch.cat([critic[..., :start], critic[..., start + VELOCITY :]], -1)

    @torch.no_grad()
    def check(self, history: Tensor, critic: Tensor) -> bool:
        """Raises if a rollout contradicts the layout.

        The current frame of the stack must be closer to the critic's frame than any other. It may be noisy: their mean
        squared difference may be up to a quarter of the variance of the critic's frame.

        Args:
            history: ``(*batch, frames * frame)``.
            critic: ``(*batch, frame + 3)``, of the same steps.

        Returns:
            Whether the rollout proves anything. It does not where all frames of every stack are equal, as right after a
            reset.

        Raises:
            ValueError: naming the frame that is closer, or the deviation.
        """
        wanted = self.frame_of(critic).reshape(-1, 1, self.frame)
        stack = history.reshape(-1, self.frames, self.frame)
        errors = (stack - wanted).square().mean((0, 2))
        position = self.frames - 1 if self.order == "oldest_first" else 0
        spread = wanted.var(0, correction=0).mean()
        closest = int(errors.argmin())
        if bool(errors[closest] < errors[position]):
            raise ValueError(
                f"The stack is declared {self.order}, but the critic's frame is closest to frame {closest} of "
                f"{self.frames}, not to frame {position} (mean squared differences {errors[closest]:.3g} and "
                f"{errors[position]:.3g}). Declare the other history_layout, or put the same entries into both groups."
            )
        if bool(errors[position] > _LARGEST_ERROR * spread + 1e-8):
            raise ValueError(
                f"The current frame of the history is not the critic's: mean squared difference {errors[position]:.3g} "
                f"at a variance of {spread:.3g}. Put the same {self.frame} entries into both, in the same order, "
                f"with the velocity at entry {self.frame if self.velocity is None else self.velocity}."
            )
        return self.frames == 1 or bool((stack != stack[:, :1]).any())


class HIMRolloutCheck:
    """Raises where a rollout is not what the estimator needs.

    The estimator learns what follows each step. An environment that hides the last observation of an episode marks the
    row with ``("next", "final_obs_missing")``; the observation acted on stands in for it, and the estimator would learn
    that nothing changes there.

    Until a rollout proves it, the check also compares the order of the frames with the layout, see
    ``HIMLayout.check``.

    Args:
        layout: of both groups.
        history: the group of stacked frames.
        critic: the group of one frame and the velocity.
        accept_missing_final_observations: whether rows without their last observation are accepted as targets. Default
            False.

    Raises:
        ValueError: (when called with a rollout ``[N, T]``) for such rows that are not accepted, or another layout.

    Examples:
        >>> from tensordict import TensorDict
        >>> check = HIMRolloutCheck(HIMLayout(frame=1, frames=2, order="oldest_first"))
        >>> data = TensorDict(history=torch.tensor([[[1.0, 5.0]]]), critic=torch.tensor([[[5.0, 0, 0, 0]]]))
        >>> data["next", "final_obs_missing"] = torch.tensor([[[False]]])
        >>> check(data)
    """

    def __init__(
        self,
        layout: HIMLayout,
        history: str = "history",
        critic: str = "critic",
        *,
        accept_missing_final_observations: bool = False,
    ) -> None:
        self.layout, self.history, self.critic = layout, history, critic
        self.accept_missing_final_observations = accept_missing_final_observations
        self._layout_is_proven = False

    def __call__(self, rollout: TensorDictBase) -> None:
        """Looks at a rollout."""
        if not self._layout_is_proven:
            self._layout_is_proven = self.layout.check(rollout[self.history], rollout[self.critic])
        missing = rollout.get(("next", "final_obs_missing"), None)
        if missing is None or self.accept_missing_final_observations:
            return
        if count := int(missing.sum()):
            raise ValueError(
                f"The environment does not give the last observation of {count} episodes that ended in this rollout. "
                "The one acted on stands in for it, and the estimator would learn that nothing changes in these steps. "
                "Let the simulator give it (extras['final_observations']), or accept this: "
                "accept_missing_final_observations=True (--algorithm.accept_missing_final_observations true)."
            )


def _velocity_start(env: EnvBase, critic: str, width: int) -> int | None:
    """The first entry of the velocity, from the environment's ``critic_layout``; None where it declares none."""
    declared = getattr(env, "critic_layout", None)
    if declared is None:
        return None
    start = 0
    for name, size in declared:
        if name == "linear_velocity":
            break
        start += size
    names = [f"{name} {size}" for name, size in declared]
    has_velocity = ("linear_velocity", VELOCITY) in [tuple(entry) for entry in declared]
    if not has_velocity or sum(size for _, size in declared) != width:
        raise ValueError(
            f"The environment's critic_layout is {', '.join(names)}; expected entries that add up to the {width} of "
            f"{critic!r}, among them linear_velocity {VELOCITY}."
        )
    return start
