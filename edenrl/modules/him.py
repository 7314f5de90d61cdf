"""Hybrid internal model: an actor that estimates its velocity and what comes next from a stack of past frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.data import TensorSpec
from torchrl.modules import ProbabilisticActor

from edenrl.modules.actor_critic import gaussian_actor
from edenrl.modules.him_layout import VELOCITY, HIMLayout
from edenrl.modules.mlp import GaussianMLP, GroupMLP

__all__ = ["HIMActor", "HIMEstimator", "him_actor", "sinkhorn"]


@torch.no_grad()
def sinkhorn(scores: Tensor, eps: float = 0.05, iterations: int = 3) -> Tensor:
    """Soft assignments of samples to prototypes that use all prototypes about equally.

    Starts from ``exp(scores / eps)``. Each iteration scales every prototype to the same weight over the batch, then
    every sample to weight 1. It works on logarithms, so that no score overflows, and without gradient.

    Args:
        scores: similarity of each sample to each prototype, ``[batch, prototypes]``.
        eps: temperature; smaller values give assignments closer to 0 and 1. Default 0.05.
        iterations: number of scalings. Default 3.

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
    """Estimates the velocity and a latent of unit norm from a stack of frames.

    A second encoder gives the latent of the observation that follows, with which the first latent should agree.

    Args:
        layout: of the history and of the critic's observation.
        encoder_hidden: widths of the encoder of the history.
        target_hidden: widths of the encoder of the next critic observation.
        latent_dim: width of the latent.
        num_prototypes: directions that latents are assigned to, see ``edenrl.objectives.HIMEstimatorLoss``.
        target_skip_dim: leading entries of the next frame that its encoder does not see. They hold the command, which
            no history can predict.
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
        self.encoder = GroupMLP(layout.history_width, VELOCITY + latent_dim, encoder_hidden, **options)
        target_width = layout.frame + VELOCITY - target_skip_dim
        self.target_encoder = GroupMLP(target_width, latent_dim, target_hidden, **options)
        self.prototypes = nn.Parameter(F.normalize(torch.randn(num_prototypes, latent_dim), dim=-1))

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity ``(*batch, 3)``, in the critic's scale, and latent ``(*batch, latent_dim)`` of a history."""
        # One order for every environment, so that the weights do not depend on the order in which it stacks.
        velocity, latent = self.encoder(self.layout.oldest_first(history)).split([VELOCITY, self.latent_dim], -1)
        return velocity, F.normalize(latent, dim=-1)

    def target_input(self, critic: Tensor) -> Tensor:
        """What the target encoder sees of a critic's observation: the frame without its head, then the velocity."""
        frame, velocity = self.layout.frame_of(critic), self.layout.velocity_of(critic)
        return torch.cat([frame[..., self.target_skip_dim :], velocity], -1)

    def target(self, critic: Tensor) -> Tensor:
        """Latent ``(*batch, latent_dim)`` of a critic's observation."""
        return F.normalize(self.target_encoder(self.target_input(critic)), dim=-1)

    def unit_prototypes(self) -> Tensor:
        """The prototypes, scaled back to unit norm in place. No gradient passes through the scaling."""
        # Through .data, because autograd would refuse a change in place between a first use and its backward. A second
        # call changes no value.
        self.prototypes.data.copy_(F.normalize(self.prototypes.data, dim=-1))
        return self.prototypes


class HIMActor(nn.Module):
    """Gaussian actor on the current frame and an estimate from the history; returns ``(loc, scale)``.

    The estimate enters without gradient, so the losses of the actor do not train the estimator. Exports hold the
    encoder and the actor's own layers only.

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
        width = layout.frame + VELOCITY + self.estimator.latent_dim
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
