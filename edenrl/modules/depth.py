"""Networks of a student that walks by a depth camera: its encoders, and the actor that they feed."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from edenrl.modules.rma import RMAActor

__all__ = ["DepthBackbone", "DepthEncoder", "DepthStudent"]


class DepthBackbone(nn.Module):
    """Convolutions that turn one depth image into a latent.

    Convolution 5x5 to 32 channels, max-pool 2x2, ELU, convolution 3x3 to 64 channels, ELU, linear to 128, ELU, linear
    to ``latent``, ELU; PyTorch's default initialization.

    Args:
        image: height and width of the image, at least 10 pixels each. Default 58 x 87.
        latent: width of the output. Default 32.

    Raises:
        ValueError: for an image that the convolutions shrink to nothing, or one of another size.

    Source: Cheng et al. 2023, "Extreme Parkour with Legged Robots", arXiv:2309.14341.

    Examples:
        >>> DepthBackbone()(torch.zeros(4, 58, 87)).shape
        torch.Size([4, 32])
    """

    def __init__(self, image: tuple[int, int] = (58, 87), latent: int = 32) -> None:
        super().__init__()
        height, width = ((size - 4) // 2 - 2 for size in image)
        if min(height, width) < 1:
            raise ValueError(f"image={tuple(image)} was given; expected a height and width of at least 10 pixels.")
        self.image = (int(image[0]), int(image[1]))
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=5),
            nn.MaxPool2d(2),
            nn.ELU(),
            nn.Conv2d(32, 64, kernel_size=3),
            nn.ELU(),
            nn.Flatten(),
            nn.Linear(64 * height * width, 128),
            nn.ELU(),
            nn.Linear(128, latent),
            nn.ELU(),
        )

    def forward(self, depth: Tensor) -> Tensor:
        """Maps images ``(*batch, height, width)`` to ``(*batch, latent)``."""
        if tuple(depth.shape[-2:]) != self.image:
            raise ValueError(
                f"Depth images of shape {tuple(depth.shape)} were given; expected (*batch, {self.image[0]}, "
                f"{self.image[1]})."
            )
        latent: Tensor = self.layers(depth.reshape(-1, 1, *self.image))
        return latent.reshape(*depth.shape[:-2], -1)


class DepthEncoder(nn.Module):
    """A recurrent encoder of depth images and proprioception, which also predicts the yaw angles to the way-points.

    The image's latent and ``prop``, with zeros in its yaw slots, go through linear layers of 128 and 32 (ELU between),
    one GRU step, a linear layer and a tanh. The outputs are a latent that replaces the one of a scan, and the yaw
    angles, which are the last outputs times ``yaw_scale``.

    Args:
        num_prop: width of ``prop``. Default 53.
        image: height and width of the image. Default 58 x 87.
        latent: width of the latent that goes to the actor. Default 32.
        hidden: width of the GRU. Default 512.
        yaw_slots: start and stop of the two entries of ``prop`` that hold the true yaw angles. Default 6 and 8.
        yaw_scale: largest angle it can predict, in rad. Default 1.5.

    Raises:
        ValueError: for yaw slots that are not two entries of ``prop``, or a scale that is no positive number.

    Source: Cheng et al. 2023, arXiv:2309.14341.

    Examples:
        >>> encoder = DepthEncoder(num_prop=53, hidden=16)
        >>> latent, yaw, hidden = encoder(torch.zeros(4, 58, 87), torch.zeros(4, 53), encoder.start(4))
        >>> latent.shape, yaw.shape, hidden.shape
        (torch.Size([4, 32]), torch.Size([4, 2]), torch.Size([4, 16]))
    """

    def __init__(
        self,
        num_prop: int = 53,
        *,
        image: tuple[int, int] = (58, 87),
        latent: int = 32,
        hidden: int = 512,
        yaw_slots: tuple[int, int] = (6, 8),
        yaw_scale: float = 1.5,
    ) -> None:
        super().__init__()
        start, stop = yaw_slots
        if not 0 <= start <= num_prop - 2 or stop != start + 2:
            raise ValueError(
                f"yaw_slots={tuple(yaw_slots)} was given; expected a start and a stop, two apart, inside the "
                f"{num_prop} entries of prop."
            )
        if not 0 < yaw_scale < math.inf:
            raise ValueError(f"yaw_scale={yaw_scale} was given; expected a positive angle in rad.")
        self.yaw_slots, self.yaw_scale = (start, stop), yaw_scale
        self.num_prop, self.latent, self.hidden = num_prop, latent, hidden
        self.backbone = DepthBackbone(image)
        self.combine = nn.Sequential(nn.Linear(32 + num_prop, 128), nn.ELU(), nn.Linear(128, 32))
        self.gru = nn.GRUCell(32, hidden)
        self.out = nn.Sequential(nn.Linear(hidden, latent + stop - start), nn.Tanh())

    def start(self, batch: int) -> Tensor:
        """The state before the first image: zeros ``[batch, hidden]``."""
        return self.gru.weight_hh.new_zeros(batch, self.hidden)

    def forward(self, depth: Tensor, prop: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sees one image in each row.

        Args:
            depth: images ``[batch, height, width]``.
            prop: proprioception ``[batch, num_prop]``; its yaw slots are not read.
            hidden: state of the GRU ``[batch, hidden]``.

        Returns:
            The latent, the predicted yaw angles in rad and the next state.
        """
        seen = torch.cat([self.backbone(depth), _with_yaw(prop, self.yaw_slots)], -1)
        hidden = self.gru(self.combine(seen), hidden)
        out = self.out(hidden)
        return out[..., : self.latent], self.yaw_scale * out[..., self.latent :], hidden


class DepthStudent(nn.Module):
    """A copy of a teacher's actor that reads a depth image where the teacher reads a scan of the ground.

    Nothing privileged is read: the encoder's latent replaces the scan latent, the history latent replaces the
    privileged one, the estimator predicts ``priv_explicit``, and the yaw slots of ``prop`` hold the encoder's
    prediction, detached. In the frames of the history these slots are always zero. Only ``act`` can be given a gate,
    which lets the true yaw angles through; a rollout for training does so, a deployed student never does.

    The encoder runs only when there is a new image; until the next one latent and yaw are held. ``see`` takes the
    image, ``act`` gives the action, ``forward`` does both (see ``DepthPolicy``).

    Of the actor, backbone and history encoder learn. Its other parts are frozen, because the losses do not reach them.

    Args:
        teacher: the actor to start from. It is copied.
        encoder: the depth encoder, for the same ``prop`` and with the width of the teacher's scan latent.

    Attributes:
        updates: a buffer with the number of updates; count each with ``student.updates += 1``. In ``eval`` mode a
            student that was never updated refuses to act.

    Raises:
        ValueError: for a teacher without a scan, or one that the encoder does not fit.

    Source: Cheng et al. 2023, arXiv:2309.14341. There the student is given the true ``priv_explicit``.

    Examples:
        >>> teacher = RMAActor(dict(prop=53, scan=132, priv_explicit=9, priv_latent=29, history=530), num_actions=12)
        >>> student = DepthStudent(teacher, DepthEncoder(53, hidden=16))
        >>> state = student.start(2)
        >>> prop, depth, history = torch.zeros(2, 53), torch.zeros(2, 58, 87), torch.zeros(2, 530)
        >>> action, *state = student(prop, history, depth, torch.ones(2, 1), *state)
        >>> action.shape, [part.shape[1] for part in state]
        (torch.Size([2, 12]), [16, 32, 2])
    """

    updates: Tensor

    def __init__(self, teacher: RMAActor, encoder: DepthEncoder) -> None:
        super().__init__()
        scan = teacher.scan_encoder
        if scan is None:
            raise ValueError(
                "This teacher reads no scan, so there is nothing that a depth image could replace. Train it with one."
            )
        latent = [layer for layer in scan if isinstance(layer, nn.Linear)][-1].out_features
        if (latent, teacher.widths["prop"]) != (encoder.latent, encoder.num_prop):
            raise ValueError(
                f"The teacher reads a prop of {teacher.widths['prop']} and a scan latent of {latent} numbers; the "
                f"encoder was built for {encoder.num_prop} and {encoder.latent}. Build it for the teacher's."
            )
        self.actor, self.encoder = copy.deepcopy(teacher).requires_grad_(False), encoder
        for part in (self.actor.backbone, self.actor.history_encoder):
            part.requires_grad_(True)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def start(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """The state that an episode begins with: zeros for the GRU, the latent and the yaw angles."""
        hidden, slots = self.encoder.start(batch), self.encoder.yaw_slots
        return hidden, hidden.new_zeros(batch, self.encoder.latent), hidden.new_zeros(batch, slots[1] - slots[0])

    def see(
        self, prop: Tensor, depth: Tensor, new: Tensor, hidden: Tensor, latent: Tensor, yaw: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The state after this step's images; rows whose ``new`` ``[batch, 1]`` is not above 0.5 keep theirs."""
        seen_latent, seen_yaw, seen_hidden = self.encoder(depth, prop, hidden)
        rows = new > 0.5
        pairs = ((seen_hidden, hidden), (seen_latent, latent), (seen_yaw, yaw))
        hidden, latent, yaw = (torch.where(rows, after, before) for after, before in pairs)
        return hidden, latent, yaw

    def act(self, prop: Tensor, history: Tensor, latent: Tensor, yaw: Tensor, gate: Tensor | None = None) -> Tensor:
        """The action mean ``[batch, actions]`` for what was last seen.

        Args:
            prop: proprioception ``[batch, num_prop]``; without a gate its yaw slots are not read.
            history: the last frames of ``prop``; their yaw slots are not read.
            latent: the encoder's latent.
            yaw: the encoder's yaw angles.
            gate: ``[batch, 1]``, for training alone: rows in which it is not above 0.5 act on the true yaw angles of
                ``prop`` instead of ``yaw``. Default: all rows act on ``yaw``.
        """
        slots = self.encoder.yaw_slots
        own = yaw.detach()
        if gate is not None:
            own = torch.where(gate > 0.5, own, prop[..., slots[0] : slots[1]])
        frames = history.unflatten(-1, (-1, self.encoder.num_prop))
        # The frames hold the true angles, which a robot does not know.
        blind = _with_yaw(frames, slots).flatten(-2)
        loc: Tensor = self.actor(
            _with_yaw(prop, slots, own), history=blind, latent="history", estimated=True, scan_latent=latent
        )[0]
        return loc

    def forward(
        self,
        prop: Tensor,
        history: Tensor,
        depth: Tensor,
        new: Tensor,
        hidden: Tensor,
        latent: Tensor,
        yaw: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step: the action mean and the next state.

        Raises:
            ValueError: in ``eval`` mode, for a student that was never updated.
        """
        if not self.training and not bool(self.updates):
            raise ValueError(
                "This student was never updated: its depth encoder holds random weights. Distil it first, with "
                "examples/distill_rma.py TEACHER_RUN, or load a checkpoint of a distillation."
            )
        if bool((new > 0.5).any()):  # most steps have no new image and need no encoder
            hidden, latent, yaw = self.see(prop, depth, new, hidden, latent, yaw)
        return self.act(prop, history, latent, yaw), hidden, latent, yaw

    def export_module(self) -> nn.Module:
        """The same network without a branch, because exporters cannot follow one: its encoder runs at every step."""
        return _Unconditional(self)


class _Unconditional(nn.Module):
    def __init__(self, student: DepthStudent) -> None:
        super().__init__()
        self.student = student
        # For the spec of an exported policy: what is not read of the first two inputs, prop and history.
        self.unread = dict.fromkeys((0, 1), student.encoder.yaw_slots)

    def forward(self, prop: Tensor, history: Tensor, depth: Tensor, new: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        hidden, latent, yaw = self.student.see(prop, depth, new, *state)
        return self.student.act(prop, history, latent, yaw), hidden, latent, yaw


def _with_yaw(prop: Tensor, slots: tuple[int, int], yaw: Tensor | None = None) -> Tensor:
    """``prop`` with other numbers in its yaw slots: ``yaw``, or zeros."""
    start, stop = slots
    filling = torch.zeros_like(prop[..., start:stop]) if yaw is None else yaw
    return torch.cat([prop[..., :start], filling, prop[..., stop:]], -1)
