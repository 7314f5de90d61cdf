"""Rapid motor adaptation: an actor that reads privileged information, and the encoder of its history."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from edenrl.modules.groups import require_layers
from edenrl.modules.mlp import StateIndependentStd, activation_class, at_least

__all__ = ["RMA_CHUNKS", "HistoryEncoder", "RMAActor"]

RMA_CHUNKS = ("prop", "scan", "priv_explicit", "priv_latent", "history")
"""What an ``RMAActor`` reads, in the order of a flat observation."""

# Frames -> (channels, kernel, stride) of each convolution; every row ends with an output of thirty numbers.
_CONVOLUTIONS = {
    10: ((20, 4, 2), (10, 2, 1)),
    20: ((20, 6, 2), (10, 4, 2)),
    50: ((20, 8, 4), (10, 5, 1), (10, 5, 1)),
}
_CHANNELS = 30


class HistoryEncoder(nn.Module):
    """Maps a window of frames to a latent: each frame through one layer, then convolutions over time.

    Args:
        frame_width: width of a frame.
        frames: length of the window: 10, 20 or 50.
        latent: width of the output.
        activation: "elu" (default), "relu", "tanh" or "silu", after every layer.

    Raises:
        ValueError: for another length or activation.

    Source: Kumar et al. 2021, "RMA: Rapid Motor Adaptation for Legged Robots", arXiv:2107.04034.

    Examples:
        >>> HistoryEncoder(frame_width=6, frames=10, latent=3)(torch.zeros(4, 60)).shape
        torch.Size([4, 3])
    """

    def __init__(self, frame_width: int, frames: int, latent: int, activation: str = "elu") -> None:
        super().__init__()
        nonlinear = activation_class(activation)
        if frames not in _CONVOLUTIONS:
            raise ValueError(
                f"A history of {frames} frames was given; its convolutions exist for {sorted(_CONVOLUTIONS)} frames. "
                "Publish one of these lengths."
            )
        self.frames, self.frame_width = frames, frame_width
        self.project = nn.Sequential(nn.Linear(frame_width, _CHANNELS), nonlinear())
        layers: list[nn.Module] = []
        before = _CHANNELS
        for channels, kernel, stride in _CONVOLUTIONS[frames]:
            layers += [nn.Conv1d(before, channels, kernel, stride), nonlinear()]
            before = channels
        self.convolve = nn.Sequential(*layers, nn.Flatten())
        self.out = nn.Sequential(nn.Linear(30, latent), nonlinear())

    def forward(self, history: Tensor) -> Tensor:
        """Maps ``(*batch, frames * frame_width)``, frame after frame, to ``(*batch, latent)``."""
        # Convolutions know one batch dimension only.
        frames = self.project(history.reshape(-1, self.frames, self.frame_width))
        return self.out(self.convolve(frames.transpose(1, 2))).reshape(*history.shape[:-1], -1)


class RMAActor(nn.Module):
    """A Gaussian actor with a privileged latent, a history latent that imitates it, and an estimator.

    The backbone reads ``prop``, a latent of ``scan``, ``priv_explicit`` and one of two latents of equal width. The
    privileged encoder makes one from ``priv_latent``, which only a simulation has. The history encoder makes the other
    from ``history``, the last frames of ``prop``. The estimator predicts ``priv_explicit`` from ``prop``.

    Each call chooses the latent, and whether the prediction (detached) replaces ``priv_explicit``. With
    ``latent="history"`` and ``estimated=True`` nothing privileged is read: a robot runs the actor so.

    Encoders have the activation after every layer; the scan encoder ends in a tanh. Backbone and estimator are linear
    at the end. Observations are not normalized: they are expected to carry fixed scales.

    Args:
        widths: width of every chunk of ``RMA_CHUNKS``, e.g. ``dict(prop=53, scan=132, priv_explicit=9, priv_latent=29,
            history=530)``. ``scan`` may be 0 or left out; ``history`` is 10, 20 or 50 times ``prop``.
        num_actions: number of actions.
        hidden: hidden widths of the backbone.
        scan_hidden: widths of the scan encoder; the last one is the width of its latent.
        priv_hidden: widths of the privileged encoder; the last one is the width of both latents.
        estimator_hidden: hidden widths of the estimator.
        activation: "elu" (default), "relu", "tanh" or "silu", of all these networks.
        tanh: whether a tanh bounds the action mean.
        init_std: standard deviation of the action noise at the start.

    Raises:
        ValueError: for widths that are missing, unknown or do not fit each other, or an unknown activation.

    Source: Kumar et al. 2021, arXiv:2107.04034, in the form of Cheng et al. 2023, "Extreme Parkour with Legged Robots",
    arXiv:2309.14341.

    Examples:
        >>> widths = dict(prop=6, scan=11, priv_explicit=3, priv_latent=5, history=60)
        >>> actor = RMAActor(widths, num_actions=4)
        >>> chunks = {name: torch.zeros(7, width) for name, width in widths.items()}
        >>> loc, scale = actor(**chunks)
        >>> loc.shape
        torch.Size([7, 4])
        >>> deployed = dict(latent="history", estimated=True)
        >>> loc, scale = actor(chunks["prop"], chunks["scan"], history=chunks["history"], **deployed)
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        num_actions: int,
        *,
        hidden: Sequence[int] = (512, 256, 128),
        scan_hidden: Sequence[int] = (128, 64, 32),
        priv_hidden: Sequence[int] = (64, 20),
        estimator_hidden: Sequence[int] = (128, 64),
        activation: str = "elu",
        tanh: bool = False,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        require_layers(
            "RMAActor",
            hidden=hidden,
            scan_hidden=scan_hidden,
            priv_hidden=priv_hidden,
            estimator_hidden=estimator_hidden,
        )
        self.widths, self.num_actions = _check_widths(widths), num_actions
        prop, scan, priv_explicit, priv_latent, history = self.widths.values()
        nonlinear = activation_class(activation)
        self.scan_encoder = _mlp(scan, scan_hidden, nonlinear, nn.Tanh) if scan else None
        self.priv_encoder = _mlp(priv_latent, priv_hidden, nonlinear, nonlinear)
        self.history_encoder = HistoryEncoder(prop, history // prop, priv_hidden[-1], activation)
        self.estimator = _mlp(prop, [*estimator_hidden, priv_explicit], nonlinear, None)
        read = prop + (scan_hidden[-1] if scan else 0) + priv_explicit + priv_hidden[-1]
        self.backbone = _mlp(read, [*hidden, num_actions], nonlinear, nn.Tanh if tanh else None)
        head = [layer for layer in self.backbone if isinstance(layer, nn.Linear)][-1]
        nn.init.orthogonal_(head.weight, 0.01)
        self.std = StateIndependentStd(num_actions, init_std)

    def forward(
        self,
        prop: Tensor,
        scan: Tensor | None = None,
        priv_explicit: Tensor | None = None,
        priv_latent: Tensor | None = None,
        history: Tensor | None = None,
        *,
        latent: Literal["privileged", "history"] | Tensor = "privileged",
        estimated: bool = False,
        scan_latent: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Maps chunks ``(*batch, width)`` to the action's mean and standard deviation ``(*batch, num_actions)``.

        Args:
            prop: proprioception.
            scan: heights around the robot.
            priv_explicit: quantities that the estimator predicts; not read when ``estimated``.
            priv_latent: what the privileged encoder reads; not read with the history's latent.
            history: the last frames of ``prop``; not read with the privileged latent.
            latent: which encoder's latent the backbone reads, or a latent, ``(*batch, priv_hidden[-1])``.
            estimated: whether the estimator's prediction replaces ``priv_explicit``.
            scan_latent: takes the place of the scan encoder's output, ``(*batch, scan_hidden[-1])``.
        """
        prop = self._given("prop", prop)
        if not isinstance(latent, Tensor):
            latent = self.encode(latent, priv_latent=priv_latent, history=history)
        if scan_latent is None and self.scan_encoder is not None:
            scan_latent = self.scan_encoder(self._given("scan", scan))
        explicit = self.estimator(prop).detach() if estimated else self._given("priv_explicit", priv_explicit)
        parts = [prop, explicit, latent] if scan_latent is None else [prop, scan_latent, explicit, latent]
        return self.std.beside(self.backbone(torch.cat(parts, -1)))

    def encode(
        self,
        latent: Literal["privileged", "history"],
        *,
        priv_latent: Tensor | None = None,
        history: Tensor | None = None,
    ) -> Tensor:
        """The privileged latent of ``priv_latent`` or the history latent of ``history``, ``(*batch, latent)``."""
        if latent == "privileged":
            encoded: Tensor = self.priv_encoder(self._given("priv_latent", priv_latent))
        elif latent == "history":
            encoded = self.history_encoder(self._given("history", history))
        else:
            raise ValueError(f"latent={latent!r} was given; expected 'privileged' or 'history'.")
        return encoded

    def _given(self, name: str, chunk: Tensor | None) -> Tensor:
        if chunk is None:
            raise ValueError(f"This composition of the actor reads {name}, which was not given.")
        return at_least(chunk, self.std.raw_log_std)


def _check_widths(widths: Mapping[str, int]) -> dict[str, int]:
    """The widths of all chunks, in their order."""
    if not isinstance(widths, Mapping):
        raise TypeError(f"RMAActor needs widths as a mapping of {list(RMA_CHUNKS)} to integers, got {widths!r}.")
    wrong = [name for name in RMA_CHUNKS if name != "scan" and widths.get(name, 0) < 1]
    if wrong or set(widths) - set(RMA_CHUNKS):
        raise ValueError(
            f"widths={dict(widths)} was given; expected the width of each of {list(RMA_CHUNKS)}, at least 1 but for "
            f"scan, which may be missing{f'. Wrong: {wrong}' if wrong else ''}."
        )
    if widths["history"] % widths["prop"]:
        raise ValueError(
            f"history is {widths['history']} wide, which is no multiple of the {widths['prop']} of prop: it holds the "
            "last frames of prop, one after another."
        )
    return {name: int(widths.get(name, 0)) for name in RMA_CHUNKS}


def _mlp(
    in_features: int, widths: Sequence[int], between: type[nn.Module], last: type[nn.Module] | None
) -> nn.Sequential:
    """Linear layers with an activation between them; ``last`` follows the last one."""
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        linear = nn.Linear(in_features, width)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        activation = between if i < len(widths) - 1 else last
        layers += [linear] if activation is None else [linear, activation()]
        in_features = width
    return nn.Sequential(*layers)
