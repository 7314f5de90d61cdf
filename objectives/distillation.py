"""The loss of a depth student that imitates its teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import DepthPolicy, DepthStudent

__all__ = ["DepthDistillationLoss"]


class DepthDistillationLoss(LossModule):
    r"""Distance of a student's actions to its teacher's, and of its yaw angles to the true ones.

    ``mean |teacher_action - student_action|_2 + mean |yaw - yaw_prediction|_2``, norms of vectors, not squared. Actions
    count at every step, yaw angles where the encoder ran (``depth_new``; everywhere if the data has no such entry).

    Reads rollouts that still carry the graph, ``[*batch]`` as ``DepthDistillationCollector`` yields them, and reaches
    the student through them: by back-propagation through time over the whole rollout. The student that acted must be
    this one; the loss keeps it as it is (no functional copy).

    Outputs: ``loss_action`` and ``loss_yaw`` (rad).

    Args:
        student: the student that acted, or its policy.
        reduction: "mean" (default) or "sum" over what counts, or "none": one value per step ``[*batch]``, zero where a
            yaw angle does not count.

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

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    rollout_kind: ClassVar[str] = "differentiable"

    student: DepthStudent
    _in_keys: list[NestedKey] | None
    _out_keys: list[NestedKey] | None

    def __init__(
        self, student: DepthStudent | DepthPolicy, *, reduction: Literal["mean", "sum", "none"] = "mean"
    ) -> None:
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"DepthDistillationLoss needs reduction 'mean', 'sum' or 'none', got {reduction!r}.")
        super().__init__()
        self.student = student.module if isinstance(student, DepthPolicy) else student
        self.reduction = reduction
        self._in_keys = self._out_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` reads."""
        if self._in_keys is None:
            keys = self.tensor_keys
            self._in_keys = [keys.teacher_action, keys.student_action, keys.yaw, keys.yaw_prediction, keys.depth_new]
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` returns."""
        if self._out_keys is None:
            self._out_keys = ["loss_action", "loss_yaw"]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys = values

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        self._in_keys = None  # no estimator; the keys were renamed

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: "student_actor", "depth_backbone" (convolutions) and "depth_recurrent" (the rest)."""
        encoder = self.student.encoder
        recurrent = [module for name, module in encoder.named_children() if name != "backbone"]
        parts: dict[str, list[nn.Module]] = {
            "student_actor": [self.student.actor],
            "depth_backbone": [encoder.backbone],
            "depth_recurrent": recurrent,
        }
        return {
            name: [p for module in modules for p in module.parameters() if p.requires_grad]
            for name, modules in parts.items()
        }

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the losses of a batch ``[*batch]``."""
        keys = self.tensor_keys
        action = self._distance(tensordict, keys.teacher_action, keys.student_action)
        yaw = self._distance(tensordict, keys.yaw, keys.yaw_prediction)
        new = tensordict.get(keys.depth_new, None)
        counted = torch.ones_like(yaw, dtype=torch.bool) if new is None else new.bool().reshape(yaw.shape)
        # where: between images nothing is counted, whatever it is.
        yaw = torch.where(counted, yaw, 0.0)
        return TensorDict(
            loss_action=self._reduce(action, action.numel()),
            loss_yaw=self._reduce(yaw, counted.sum().clamp(min=1)),
        )

    def _distance(self, tensordict: TensorDictBase, target: NestedKey, prediction: NestedKey) -> Tensor:
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

    def _reduce(self, values: Tensor, count: Tensor | int) -> Tensor:
        if self.reduction == "none":
            return values
        return values.sum() / count if self.reduction == "mean" else values.sum()
