"""The loss of a depth student that imitates its teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import DepthPolicy, DepthStudent
from edenrl.objectives.base import LossMixin, require_instance

__all__ = ["DepthDistillationLoss"]


class DepthDistillationLoss(LossMixin, LossModule):
    r"""Distance of a student's actions to its teacher's, and of its yaw angles to the true ones.

    - ``loss_action = mean |teacher_action - student_action|``, over all steps;
    - ``loss_yaw = mean |yaw - yaw_prediction|`` (rad), over the steps at which the encoder saw a new image
      (``depth_new``; all steps if the data has no such entry).

    Both are Euclidean norms, not squared.

    Reads rollouts ``[*batch]`` that still carry the graph, as ``DepthDistillationCollector`` yields them. The gradient
    reaches the student through the data, by back-propagation through time over the whole rollout: the student that
    acted must be this one. The loss keeps it as it is (no functional copy).

    Args:
        student: the student that acted, or its policy.
        reduction: "mean" (default) or "sum" over the steps that count, or "none": one value per step, ``[*batch]``,
            which is zero where the yaw does not count.

    Raises:
        ValueError: for an unknown reduction, entries whose shapes do not fit each other, or data without a graph.

    Source: Cheng et al. 2023, "Extreme Parkour with Legged Robots", arXiv:2309.14341.

    Examples:
        >>> from edenrl.modules import DepthEncoder, RMAActor
        >>> actor = RMAActor(dict(prop=53, scan=132, priv_explicit=9, priv_latent=29, history=530), num_actions=12)
        >>> loss = DepthDistillationLoss(DepthStudent(actor, DepthEncoder(53, hidden=16)))
        >>> data = TensorDict(
        ...     teacher_action=torch.zeros(2, 2),
        ...     student_action=torch.tensor([[3.0, 4.0], [0.0, 1.0]], requires_grad=True),
        ...     yaw=torch.zeros(2, 2),
        ...     yaw_prediction=torch.tensor([[0.6, 0.8], [9.0, 9.0]], requires_grad=True),
        ...     depth_new=torch.tensor([[True], [False]]),
        ...     batch_size=[2],
        ... )
        >>> out = loss(data)
        >>> out["loss_action"].item(), out["loss_yaw"].item()
        (3.0, 1.0)
        >>> list(loss.parameter_groups())
        ['student_actor', 'depth_backbone', 'depth_recurrent']
    """

    @dataclass
    class _AcceptedKeys:
        teacher_action: NestedKey = "teacher_action"
        student_action: NestedKey = "student_action"
        yaw: NestedKey = "yaw"
        yaw_prediction: NestedKey = "yaw_prediction"
        depth_new: NestedKey = "depth_new"

    student: DepthStudent

    def __init__(
        self, student: DepthStudent | DepthPolicy, *, reduction: Literal["mean", "sum", "none"] = "mean"
    ) -> None:
        require_instance(self, "student", student, DepthStudent, DepthPolicy)
        super().__init__(reduction=reduction)
        self.student = student.module if isinstance(student, DepthPolicy) else student

    def _make_in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        return [keys.teacher_action, keys.student_action, keys.yaw, keys.yaw_prediction, keys.depth_new]

    def _finite_keys(self) -> list[NestedKey]:
        # What lies between two images may be NaN.
        return [self.tensor_keys.teacher_action, self.tensor_keys.student_action]

    def _make_out_keys(self) -> list[NestedKey]:
        return ["loss_action", "loss_yaw"]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: "student_actor", "depth_backbone" (convolutions) and "depth_recurrent" (the rest)."""
        encoder = self.student.encoder
        recurrent = [module for name, module in encoder.named_children() if name != "backbone"]
        return {
            "student_actor": self._trained(self.student.actor),
            "depth_backbone": self._trained(encoder.backbone),
            "depth_recurrent": self._trained(*recurrent),
        }

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the losses of a batch of any shape."""
        keys = self.tensor_keys
        action = self._distance(tensordict, keys.teacher_action, keys.student_action)
        yaw = self._distance(tensordict, keys.yaw, keys.yaw_prediction)
        new = tensordict.get(keys.depth_new, None)
        counted = torch.ones_like(yaw, dtype=torch.bool) if new is None else new.bool().reshape(yaw.shape)
        # torch.where instead of a product: the yaw between two images may be NaN, and NaN * 0 is NaN.
        yaw = torch.where(counted, yaw, 0.0)
        if self.reduction == "mean":
            loss_yaw = yaw.sum() / counted.sum().clamp(min=1)
        else:
            loss_yaw = self._reduce_loss(yaw)
        return TensorDict(loss_action=self._reduce_loss(action), loss_yaw=loss_yaw)

    def _distance(self, tensordict: TensorDictBase, target: NestedKey, prediction: NestedKey) -> Tensor:
        """The distance of two entries ``[*batch, width]``, ``[*batch]``, with gradient to the prediction alone."""
        wanted, given = tensordict.get(target), tensordict.get(prediction)
        if wanted.shape != given.shape or given.dim() != tensordict.batch_dims + 1:
            raise ValueError(
                f"{target!r} and {prediction!r} have the shapes {tuple(wanted.shape)} and {tuple(given.shape)}; "
                f"expected one vector of the same width per step, {[*tensordict.batch_size, 'width']}."
            )
        if torch.is_grad_enabled() and not given.requires_grad:
            raise ValueError(
                f"{prediction!r} carries no gradient: collect with DepthDistillationCollector, and compute the loss "
                "inside its loop, before the rollout is detached."
            )
        return torch.linalg.vector_norm(wanted.detach() - given, dim=-1)
