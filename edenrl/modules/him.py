"""Hybrid internal model: an actor that estimates its velocity and what comes next from a stack of past frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor

from edenrl.modules.actor_critic import GaussianMLP, GroupMLP, gaussian_actor, observation_groups

__all__ = ["HIMActor", "HIMEstimator", "HIMLayout", "him_actor", "sinkhorn"]

_VELOCITY = 3
_ORDERS = ("oldest_first", "newest_first")
# What noise may make of a frame: the share of its spread by which it may differ from the critic's.
_LARGEST_ERROR = 0.25


@dataclass(frozen=True)
class HIMLayout:
    """Where the current frame stands in a stack of frames, and the true velocity in the critic's observation.

    The history holds ``frames`` frames of width ``frame``, the critic's observation one frame and the linear velocity
    of the trunk, 3 entries.

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
                f"velocity={self.velocity} was given; in a critic's observation of {self.frame + _VELOCITY} entries "
                f"the {_VELOCITY} of the velocity begin between 0 and {self.frame}."
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
            env: publishes both groups. ``env.history_layout`` says in which order it stacks, ``env.critic_layout``,
                pairs of name and width, where the critic's ``"linear_velocity"`` stands (default: last).
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
                f"{lacking} are missing. Groups of this environment: {observation_groups(env.observation_spec)}. "
                'Publish them (the quadruped: --env.kwargs.groups \'["history", "critic"]\'), or name others in '
                "actor_groups and critic_groups."
            )
        widths = observation_groups(env.observation_spec, [history, critic])
        frame = widths[critic] - _VELOCITY
        if frame < 1 or widths[history] % frame:
            raise ValueError(
                f"{history!r} has {widths[history]} entries and {critic!r} {widths[critic]}: the history must hold "
                f"whole frames of {widths[critic]} - {_VELOCITY} = {frame} entries, no multiple of which is "
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
        return critic[..., start : start + _VELOCITY]

    def frame_of(self, critic: Tensor) -> Tensor:
        """The frame in a critic's observation, ``(*batch, frame)``."""
        start = self.frame if self.velocity is None else self.velocity
        return torch.cat([critic[..., :start], critic[..., start + _VELOCITY :]], -1)

    @torch.no_grad()
    def check(self, history: Tensor, critic: Tensor) -> bool:
        """Raises if a rollout contradicts the layout: the current frame must be the critic's.

        The actor's frame may be noisy. It must be the stack's closest one to the critic's, within a quarter of the
        variance of the critic's.

        Args:
            history: ``(*batch, frames * frame)``.
            critic: ``(*batch, frame + 3)``, of the same steps.

        Returns:
            Whether the rollout could show it: not where every frame of a stack is the same, as right after a reset.

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


def _velocity_start(env: EnvBase, critic: str, width: int) -> int | None:
    declared = getattr(env, "critic_layout", None)
    if declared is None:
        return None
    start = 0
    for name, size in declared:
        if name == "linear_velocity":
            break
        start += size
    names = [f"{name} {size}" for name, size in declared]
    has_velocity = ("linear_velocity", _VELOCITY) in [tuple(entry) for entry in declared]
    if not has_velocity or sum(size for _, size in declared) != width:
        raise ValueError(
            f"The environment's critic_layout is {', '.join(names)}; expected entries that add up to the {width} of "
            f"{critic!r}, among them linear_velocity {_VELOCITY}."
        )
    return start


@torch.no_grad()
def sinkhorn(scores: Tensor, eps: float = 0.05, iterations: int = 3) -> Tensor:
    """Soft assignments of samples to prototypes that use all prototypes about equally.

    Starts from ``exp(scores / eps)`` and, ``iterations`` times, scales every prototype to the same weight over the
    batch and then every sample to weight 1. Works on logarithms, so that no score overflows. Without gradient.

    Args:
        scores: similarity of each sample to each prototype, ``[batch, prototypes]``.
        eps: smaller is harder. Default 0.05.
        iterations: Default 3.

    Returns:
        ``[batch, prototypes]``; rows sum to 1, columns to about ``batch / prototypes``.

    Source: Cuturi 2013, arXiv:1306.0895; as used by Caron et al. 2020 (SwAV), arXiv:2006.09882.

    Examples:
        >>> sinkhorn(torch.tensor([[0.2, 0.0], [0.1, 0.0]]), iterations=50).round(decimals=3)
        tensor([[0.7310, 0.2690],
                [0.2690, 0.7310]])
    """
    log = scores / eps
    for _ in range(iterations):
        log = log - log.logsumexp(0, keepdim=True)
        log = log.log_softmax(1)
    return log.exp()


class HIMEstimator(nn.Module):
    """Velocity and a unit-norm latent of a stack of frames, and the latent of what follows, which it should agree with.

    Args:
        layout: of the history and of the critic's observation.
        encoder_hidden: widths of the encoder of the history.
        target_hidden: widths of the encoder of the next critic observation.
        latent_dim: width of the latent.
        num_prototypes: directions that latents are assigned to, see ``edenrl.objectives.HIMEstimatorLoss``.
        target_skip_dim: leading entries of the next frame that its encoder does not see: the command, which no history
            can foretell.
        activation: as for ``GroupMLP``.

    Raises:
        ValueError: if ``target_skip_dim`` leaves nothing of the frame.

    Source: Long et al. 2024, "Hybrid Internal Model", arXiv:2312.11460; sizes as in the published HIMLoco.

    Examples:
        >>> estimator = HIMEstimator(HIMLayout(frame=10, frames=6, order="oldest_first"), latent_dim=4)
        >>> velocity, latent = estimator(torch.randn(7, 60))
        >>> velocity.shape, latent.norm(dim=-1).allclose(torch.ones(7))
        (torch.Size([7, 3]), True)
        >>> estimator.target(torch.randn(7, 13)).shape
        torch.Size([7, 4])
    """

    def __init__(
        self,
        layout: HIMLayout,
        *,
        encoder_hidden: Sequence[int] = (256, 256),
        target_hidden: Sequence[int] = (256, 256),
        latent_dim: int = 32,
        num_prototypes: int = 64,
        target_skip_dim: int = 3,
        activation: str = "elu",
    ) -> None:
        super().__init__()
        if not 0 <= target_skip_dim < layout.frame:
            raise ValueError(
                f"target_skip_dim={target_skip_dim} was given; expected at least 0 and less than the {layout.frame} "
                "entries of a frame."
            )
        self.layout, self.latent_dim, self.target_skip_dim = layout, latent_dim, target_skip_dim
        options: dict[str, Any] = {"activation": activation, "normalize": False}
        self.encoder = GroupMLP(layout.history_width, _VELOCITY + latent_dim, encoder_hidden, **options)
        target_width = layout.frame + _VELOCITY - target_skip_dim
        self.target_encoder = GroupMLP(target_width, latent_dim, target_hidden, **options)
        self.prototypes = nn.Parameter(F.normalize(torch.randn(num_prototypes, latent_dim), dim=-1))

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity ``(*batch, 3)``, in the critic's scale, and latent ``(*batch, latent_dim)`` of a history."""
        # One order for every environment: what was learned does not depend on how the stack is laid out.
        velocity, latent = self.encoder(self.layout.oldest_first(history)).split([_VELOCITY, self.latent_dim], -1)
        return velocity, F.normalize(latent, dim=-1)

    def target_input(self, critic: Tensor) -> Tensor:
        """What the target encoder sees of a critic's observation: the frame without its head, then the velocity."""
        frame, velocity = self.layout.frame_of(critic), self.layout.velocity_of(critic)
        return torch.cat([frame[..., self.target_skip_dim :], velocity], -1)

    def target(self, critic: Tensor) -> Tensor:
        """Latent ``(*batch, latent_dim)`` of a critic's observation."""
        return F.normalize(self.target_encoder(self.target_input(critic)), dim=-1)

    def unit_prototypes(self) -> Tensor:
        """The prototypes, brought back to unit norm in place; gradients do not pass through the scaling."""
        # Through .data: a second use before the backward of a first one is no error, it changes nothing.
        self.prototypes.data.copy_(F.normalize(self.prototypes.data, dim=-1))
        return self.prototypes


class HIMActor(nn.Module):
    """Gaussian actor on the current frame and what an estimator makes of the history; returns ``(loc, scale)``.

    The estimate enters without gradient: what trains the actor leaves the estimator alone. Only the encoder and the
    actor's own layers are exported.

    Args:
        layout: of the history.
        action_dim: number of actions.
        hidden: widths of the actor's hidden layers.
        activation: of actor and estimator, as for ``GroupMLP``.
        init_std: initial standard deviation.
        estimator: options of ``HIMEstimator``.

    Examples:
        >>> actor = HIMActor(HIMLayout(frame=10, frames=6, order="oldest_first"), 4)
        >>> loc, scale = actor(torch.randn(7, 60))
        >>> loc.shape, scale.shape
        (torch.Size([7, 4]), torch.Size([7, 4]))
    """

    def __init__(
        self,
        layout: HIMLayout,
        action_dim: int,
        *,
        hidden: Sequence[int] = (512, 256, 256),
        activation: str = "elu",
        init_std: float = 1.0,
        **estimator: Any,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.estimator = HIMEstimator(layout, activation=activation, **estimator)
        width = layout.frame + _VELOCITY + self.estimator.latent_dim
        self.actor = GaussianMLP(
            width, action_dim, init_std=init_std, hidden=hidden, activation=activation, normalize=False
        )

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """Maps a stack ``(*batch, frames * frame)`` to mean and standard deviation ``(*batch, action_dim)``."""
        if history.shape[-1] != self.layout.history_width:
            raise ValueError(
                f"The history has {history.shape[-1]} entries; expected {self.layout.frames} frames of "
                f"{self.layout.frame}."
            )
        with torch.no_grad():
            velocity, latent = self.estimator(history)
        loc, scale = self.actor(self.layout.current(history), velocity, latent)
        return loc, scale


def him_actor(
    layout: HIMLayout, action_spec: TensorSpec | int, *, history: str = "history", squash: bool = False, **network: Any
) -> ProbabilisticActor:
    """TensorDict form of ``HIMActor``: writes ``loc``, ``scale``, ``action`` and ``action_log_prob``.

    Args:
        layout: of the history, see ``HIMLayout.of``.
        action_spec: the environment's unbatched action spec, or the number of actions.
        history: the group of stacked frames.
        squash: map actions into the spec's box with a tanh.
        network: options of ``HIMActor``.

    Raises:
        ValueError: as for ``gaussian_actor``.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = him_actor(HIMLayout(frame=10, frames=6, order="oldest_first"), 4, hidden=(16,))
        >>> actor(TensorDict(history=torch.randn(7, 60), batch_size=[7]))["action"].shape
        torch.Size([7, 4])
    """

    def build(groups: Any, action_dim: int, **options: Any) -> HIMActor:
        return HIMActor(layout, action_dim, **options)

    return gaussian_actor({history: layout.history_width}, action_spec, squash=squash, build=build, **network)
