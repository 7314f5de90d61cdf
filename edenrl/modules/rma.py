"""Rapid motor adaptation: an actor that reads privileged information, and compositions of it that do without."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor

from edenrl.modules.actor_critic import StateIndependentStd, gaussian_actor

__all__ = ["RMA_CHUNKS", "HistoryEncoder", "RMAActor", "RMAComposition", "rma_composition", "rma_policy"]

RMA_CHUNKS = ("prop", "scan", "priv_explicit", "priv_latent", "history")
"""What an ``RMAActor`` reads, in the order of a flat observation."""

# Frames -> (channels, kernel, stride) of each convolution; thirty numbers are left in every case.
_CONVOLUTIONS = {
    10: ((20, 4, 2), (10, 2, 1)),
    20: ((20, 6, 2), (10, 4, 2)),
    50: ((20, 8, 4), (10, 5, 1), (10, 5, 1)),
}
_CHANNELS = 30


def _mlp(in_features: int, widths: Sequence[int], last: type[nn.Module] | None) -> nn.Sequential:
    """Linear layers with ELU between them; ``last`` follows the last one."""
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        linear = nn.Linear(in_features, width)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        activation = nn.ELU if i < len(widths) - 1 else last
        layers += [linear] if activation is None else [linear, activation()]
        in_features = width
    return nn.Sequential(*layers)


class HistoryEncoder(nn.Module):
    """Maps a window of frames to a latent: each frame through one layer, then convolutions over time.

    Args:
        frame_width: width of a frame.
        frames: length of the window: 10, 20 or 50.
        latent: width of the output.

    Raises:
        ValueError: for another length.

    Source: Kumar et al. 2021, "RMA: Rapid Motor Adaptation for Legged Robots", arXiv:2107.04034.

    Examples:
        >>> HistoryEncoder(frame_width=6, frames=10, latent=3)(torch.zeros(4, 60)).shape
        torch.Size([4, 3])
    """

    def __init__(self, frame_width: int, frames: int, latent: int) -> None:
        super().__init__()
        if frames not in _CONVOLUTIONS:
            raise ValueError(
                f"A history of {frames} frames was given; its convolutions exist for {sorted(_CONVOLUTIONS)} frames. "
                "Publish one of these lengths."
            )
        self.frames, self.frame_width = frames, frame_width
        self.project = nn.Sequential(nn.Linear(frame_width, _CHANNELS), nn.ELU())
        layers: list[nn.Module] = []
        before = _CHANNELS
        for channels, kernel, stride in _CONVOLUTIONS[frames]:
            layers += [nn.Conv1d(before, channels, kernel, stride), nn.ELU()]
            before = channels
        self.convolve = nn.Sequential(*layers, nn.Flatten())
        self.out = nn.Sequential(nn.Linear(30, latent), nn.ELU())

    def forward(self, history: Tensor) -> Tensor:
        """Maps ``(*batch, frames * frame_width)``, frame after frame, to ``(*batch, latent)``."""
        # Convolutions know one batch dimension only.
        frames = self.project(history.reshape(-1, self.frames, self.frame_width))
        return self.out(self.convolve(frames.transpose(1, 2))).reshape(*history.shape[:-1], -1)


class RMAActor(nn.Module):
    """A Gaussian actor with a privileged latent, a history latent that imitates it, and an estimator.

    The backbone reads ``prop``, a latent of ``scan``, ``priv_explicit`` and one of two latents of equal width: the
    privileged encoder's of ``priv_latent``, which only simulation has, or the history encoder's of ``history``, the
    last frames of ``prop``. The estimator predicts ``priv_explicit`` from ``prop``. A call chooses the latent, and
    whether the prediction (detached) stands in for ``priv_explicit``: with ``latent="history"`` and ``estimated=True``
    nothing privileged is read, which is what a robot runs.

    Encoders have ELU after every layer; the scan encoder ends in a tanh, backbone and estimator are linear at the end.
    Observations are not normalized: they are expected to carry fixed scales.

    Args:
        widths: width of every chunk of ``RMA_CHUNKS``, e.g. ``dict(prop=53, scan=132, priv_explicit=9, priv_latent=29,
            history=530)``. ``scan`` may be 0 or left out; ``history`` is 10, 20 or 50 times ``prop``.
        num_actions: number of actions.
        hidden: hidden widths of the backbone.
        scan_hidden: widths of the scan encoder, the last one of its latent.
        priv_hidden: widths of the privileged encoder, the last one of both latents.
        estimator_hidden: hidden widths of the estimator.
        tanh: whether a tanh bounds the action mean.
        init_std: standard deviation of the action noise at the start.

    Raises:
        ValueError: for widths that are missing, unknown or do not fit each other.

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
        tanh: bool = False,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.widths, self.num_actions = _check_widths(widths), num_actions
        prop, scan, priv_explicit, priv_latent, history = self.widths.values()
        self.scan_encoder = _mlp(scan, scan_hidden, nn.Tanh) if scan else None
        self.priv_encoder = _mlp(priv_latent, priv_hidden, nn.ELU)
        self.history_encoder = HistoryEncoder(prop, history // prop, priv_hidden[-1])
        self.estimator = _mlp(prop, [*estimator_hidden, priv_explicit], None)
        read = prop + (scan_hidden[-1] if scan else 0) + priv_explicit + priv_hidden[-1]
        self.backbone = _mlp(read, [*hidden, num_actions], nn.Tanh if tanh else None)
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
        if not isinstance(latent, Tensor):
            latent = self.encode(latent, priv_latent=priv_latent, history=history)
        if scan_latent is None and self.scan_encoder is not None:
            scan_latent = self.scan_encoder(_given("scan", scan))
        explicit = self.estimator(prop).detach() if estimated else _given("priv_explicit", priv_explicit)
        parts = [prop, explicit, latent] if scan_latent is None else [prop, scan_latent, explicit, latent]
        loc, std = self.backbone(torch.cat(parts, -1)), self.std()
        return loc.to(std.dtype), std.expand_as(loc)

    def encode(
        self,
        latent: Literal["privileged", "history"],
        *,
        priv_latent: Tensor | None = None,
        history: Tensor | None = None,
    ) -> Tensor:
        """The privileged latent of ``priv_latent`` or the history latent of ``history``, ``(*batch, latent)``."""
        if latent == "privileged":
            encoded: Tensor = self.priv_encoder(_given("priv_latent", priv_latent))
        elif latent == "history":
            encoded = self.history_encoder(_given("history", history))
        else:
            raise ValueError(f"latent={latent!r} was given; expected 'privileged' or 'history'.")
        return encoded


def _given(name: str, chunk: Tensor | None) -> Tensor:
    if chunk is None:
        raise ValueError(f"This composition of the actor reads {name}, which was not given.")
    return chunk


def _check_widths(widths: Mapping[str, int]) -> dict[str, int]:
    """The widths of all chunks, in their order."""
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


class RMAComposition(nn.Module):
    """One way of running an ``RMAActor``, and where in a TensorDict its chunks are; all weights are the actor's.

    Made by ``rma_policy``. Its inputs are the entries of ``in_keys``.

    Args:
        actor: the actor.
        keys: the key of every chunk, or one key that holds all of them, laid out as ``RMA_CHUNKS``.
        latent: "privileged", "history", or "switched": one of the two, as ``use_history`` says.
        estimated: whether the estimator's prediction replaces ``priv_explicit``.

    Raises:
        ValueError: for a key of a chunk that the actor does not read; in ``forward`` for widths that do not fit.

    Examples:
        >>> widths = dict(prop=6, priv_explicit=3, priv_latent=5, history=60)
        >>> RMAComposition(RMAActor(widths, 4), latent="history", estimated=True).in_keys
        ['prop', 'prop_history']
        >>> net = RMAComposition(RMAActor(widths, 4), keys="policy")
        >>> net(torch.zeros(7, 74))[0].shape
        torch.Size([7, 4])
    """

    switch: Tensor

    def __init__(
        self,
        actor: RMAActor,
        keys: Mapping[str, NestedKey] | NestedKey | None = None,
        *,
        latent: Literal["privileged", "history", "switched"] = "privileged",
        estimated: bool = False,
    ) -> None:
        super().__init__()
        if latent not in ("privileged", "history", "switched"):
            raise ValueError(f"latent={latent!r} was given; expected 'privileged', 'history' or 'switched'.")
        self.actor, self.latent, self.estimated = actor, latent, estimated
        present = [name for name, width in actor.widths.items() if width]
        self.flat = keys if isinstance(keys, str | tuple) else None
        if keys is None or isinstance(keys, Mapping):
            given: dict[str, NestedKey] = {
                **{name: name for name in present},
                "history": "prop_history",
                **(keys or {}),
            }
            if unknown := set(given) - set(present):
                raise ValueError(f"keys names {sorted(unknown)}; this actor reads {present}.")
            self.keys = {name: given[name] for name in present}
        else:
            self.keys = dict.fromkeys(present, keys)
        unread = {"privileged": {"history"}, "history": {"priv_latent"}, "switched": set()}[latent]
        self.reads = [name for name in present if name not in unread | ({"priv_explicit"} if estimated else set())]
        if latent == "switched":
            # A buffer: copies of the policy in other processes follow it as they follow the weights.
            self.register_buffer("switch", torch.tensor(False))

    @property
    def privileged_groups(self) -> tuple[NestedKey, ...]:
        """The entries that a critic reads beside this actor: everything but a history that has a key of its own."""
        keys = [key for name, key in self.keys.items() if name != "history" or self.flat is not None]
        return tuple(dict.fromkeys(keys))

    @property
    def source(self) -> dict[str, NestedKey] | NestedKey:
        """Where the chunks are, as ``keys`` were given: by chunk, or the one key of all."""
        return self.keys if self.flat is None else self.flat

    @property
    def in_keys(self) -> list[NestedKey]:
        """The keys that this composition reads."""
        return list(dict.fromkeys(self.keys[name] for name in self.reads))

    def use_history(self, on: bool) -> None:
        """Chooses the latent of a "switched" composition: the history's, or (at first) the privileged one."""
        self.switch.fill_(on)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Maps the entries of ``in_keys``, ``(*batch, width)``, to mean and standard deviation."""
        if self.flat is not None:
            chunks = self._split(inputs[0])
        else:
            chunks = dict(zip(self.reads, inputs, strict=True))
            self._check(chunks)
        read = {name: chunks[name] for name in self.reads}
        latent: Literal["privileged", "history"] | Tensor
        if self.latent == "switched":
            of_history = self.actor.encode("history", history=read.pop("history"))
            latent = torch.where(
                self.switch, of_history, self.actor.encode("privileged", priv_latent=read.pop("priv_latent"))
            )
        else:
            latent = self.latent
        mean, std = self.actor(**read, latent=latent, estimated=self.estimated)
        return mean, std

    def chunk(self, tensordict: TensorDictBase, name: str, key: NestedKey | None = None) -> Tensor:
        """One chunk of a TensorDict, also one that this composition does not read.

        Args:
            tensordict: the data.
            name: of ``RMA_CHUNKS``.
            key: where to find it, unless all chunks lie under one key. Default: as in ``keys``.
        """
        if self.flat is not None:
            return self._split(tensordict.get(self.flat))[name]
        chunk = tensordict.get(self.keys[name] if key is None else key)
        self._check({name: chunk})
        return chunk

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        widths = self.actor.widths
        if flat.shape[-1] != sum(widths.values()):
            raise ValueError(
                f"{self.flat!r} is {flat.shape[-1]} wide; expected {sum(widths.values())}, laid out as "
                f"{self._layout()}."
            )
        return dict(zip(widths, flat.split(list(widths.values()), -1), strict=True))

    def _check(self, chunks: Mapping[str, Tensor]) -> None:
        expected = self.actor.widths
        wrong = {name: chunk.shape[-1] for name, chunk in chunks.items() if chunk.shape[-1] != expected[name]}
        if wrong:
            raise ValueError(f"Chunks of the widths {wrong} were given; expected {self._layout()}.")

    def _layout(self) -> str:
        return " | ".join(f"{name} {width}" for name, width in self.actor.widths.items())


def rma_composition(policy: nn.Module) -> RMAComposition:
    """The composition inside a policy of ``rma_policy``.

    Raises:
        ValueError: if there is none.
    """
    for part in policy.modules():
        if isinstance(part, RMAComposition):
            return part
    raise ValueError(f"{type(policy).__name__} holds no RMAComposition; build the policy with rma_policy.")


def rma_policy(
    actor: RMAActor,
    keys: Mapping[str, NestedKey] | NestedKey | None = None,
    *,
    latent: Literal["privileged", "history", "switched"] = "privileged",
    estimated: bool = False,
) -> ProbabilisticActor:
    """A policy that runs an ``RMAActor`` in one composition; all compositions share the weights and the state dict.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``, and reads only the chunks that the composition uses.
    It changes no observation: a rollout keeps the true ``priv_explicit``.

    Args:
        actor: the actor.
        keys: where the chunks are: one flat key laid out as ``RMA_CHUNKS``, or the key of every chunk. Default: keys of
            their names, and "prop_history" for the history.
        latent: "privileged", "history", or "switched" for one that collects with either (see ``RMAComposition``), which
            has one entry more in its state dict.
        estimated: whether the estimator's prediction replaces ``priv_explicit``.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = RMAActor(dict(prop=6, priv_explicit=3, priv_latent=5, history=60), num_actions=4)
        >>> teacher = rma_policy(actor, estimated=True)
        >>> deployed = rma_policy(actor, latent="history", estimated=True)
        >>> td = TensorDict(prop=torch.zeros(2, 6), prop_history=torch.zeros(2, 60), batch_size=[2])
        >>> deployed(td)["action"].shape
        torch.Size([2, 4])
    """
    network = RMAComposition(actor, keys, latent=latent, estimated=estimated)
    groups = {key: 0 for key in network.in_keys}  # the network knows the widths
    return gaussian_actor(groups, actor.num_actions, build=lambda *_: network)
