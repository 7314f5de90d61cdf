"""Adversarial motion prior: the loss of the discriminator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import Discriminator

__all__ = ["AMPLoss"]


class AMPLoss(LossModule):
    r"""Least-squares loss of a discriminator between reference motion and the policy's motion.

    With ``d`` the discriminator's output for a window, ``loss_discriminator = 0.5 (mean (d_expert - 1)^2 + mean
    (d_policy + 1)^2)`` and ``loss_grad_penalty = grad_penalty_coeff * mean |grad d|^2``, the gradient taken at the
    normalized expert windows. Both kinds of windows go through the network in one pass: in training mode that is one
    power iteration of the spectral norm per call.

    Metrics: ``d_expert`` and ``d_policy``, mean outputs; ``accuracy``, the share of windows on the right side of zero,
    both kinds weighing the same.

    Args:
        discriminator: the ``edenrl.modules.Discriminator``. Its frame statistics are not changed here.
        grad_penalty_coeff: weight of the gradient penalty. Default 5.
        reduction: "mean" (default), "sum" or "none".

    Raises:
        ValueError: a negative coefficient, an unknown reduction, or windows that are not ``[*batch, K * f]``.
        KeyError: a batch without "expert_window" or "amp_window".

    Source: Peng et al. 2021, "AMP", arXiv:2104.02180.

    Examples:
        >>> from edenrl.modules import Discriminator
        >>> loss = AMPLoss(Discriminator(frame_dim=3, hidden=(8,)))
        >>> windows = {"expert_window": torch.randn(16, 15), "amp_window": torch.randn(16, 15)}
        >>> out = loss(TensorDict(windows, batch_size=[16]))
        >>> sorted(out.keys())
        ['accuracy', 'd_expert', 'd_policy', 'loss_discriminator', 'loss_grad_penalty']
        >>> (out["loss_discriminator"] + out["loss_grad_penalty"]).backward()
    """

    @dataclass
    class _AcceptedKeys:
        expert_window: NestedKey = "expert_window"
        policy_window: NestedKey = "amp_window"

    rollout_kind: ClassVar[Literal["standard", "differentiable"]] = "standard"
    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    _schedulable_buffers = frozenset({"grad_penalty_coeff"})

    grad_penalty_coeff: Tensor
    _in_keys: list[NestedKey] | None
    _out_keys: list[NestedKey] | None

    def __init__(
        self,
        discriminator: Discriminator,
        *,
        grad_penalty_coeff: float = 5.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        if grad_penalty_coeff < 0:
            raise ValueError(f"AMPLoss needs grad_penalty_coeff >= 0, got {grad_penalty_coeff}.")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"AMPLoss needs reduction 'mean', 'sum' or 'none', got {reduction!r}.")
        super().__init__()
        self.discriminator = discriminator
        self.reduction = reduction
        self.register_buffer("grad_penalty_coeff", torch.tensor(float(grad_penalty_coeff)))
        self._in_keys = self._out_keys = None

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` reads."""
        if self._in_keys is None:
            self._in_keys = [self.tensor_keys.expert_window, self.tensor_keys.policy_window]
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` returns."""
        if self._out_keys is None:
            self._out_keys = ["loss_discriminator", "loss_grad_penalty", "d_expert", "d_policy", "accuracy"]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys = values

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        self._in_keys = None  # no estimator; the keys were renamed

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "discriminator"."""
        return {"discriminator": [p for p in self.discriminator.parameters() if p.requires_grad]}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of windows in any batch shape."""
        expert, policy = self._windows(tensordict)
        expert, policy = self.discriminator.normalize(torch.stack([expert, policy])).detach()

        def outputs(expert: Tensor) -> Tensor:
            return self.discriminator.network(torch.stack([expert, policy])).squeeze(-1)

        derived: Any = torch.func.vjp(outputs, expert)
        both, pull_back = derived
        (slope,) = pull_back(torch.stack([torch.ones_like(both[0]), torch.zeros_like(both[1])]))
        d_expert, d_policy = both
        squared = 0.5 * ((d_expert - 1).square() + (d_policy + 1).square())
        penalty = self.grad_penalty_coeff * slope.square().sum(-1)
        d_expert, d_policy = d_expert.detach(), d_policy.detach()
        right = 0.5 * ((d_expert > 0).to(squared.dtype) + (d_policy < 0).to(squared.dtype))
        return TensorDict(
            {
                "loss_discriminator": self._reduce_loss(squared, tensordict),
                "loss_grad_penalty": self._reduce_loss(penalty, tensordict),
                "d_expert": d_expert.mean(),
                "d_policy": d_policy.mean(),
                "accuracy": right.mean(),
            }
        )

    def _windows(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        values = {key: tensordict.get(key, None) for key in self.in_keys}
        if missing := [key for key, value in values.items() if value is None]:
            raise KeyError(
                f"AMPLoss reads {self.in_keys}, of which the batch lacks {missing}. Put reference windows beside the "
                "policy's (MotionDataset.sample), or rename the entries with set_keys."
            )
        expert, policy = values.values()
        expected = (*tensordict.batch_size, self.discriminator.window_dim)
        if expert.shape != expected or policy.shape != expected:
            raise ValueError(
                f"AMPLoss needs windows of shape {expected}: {self.discriminator.num_frames} flattened frames of "
                f"{self.discriminator.frame_dim}; got {tuple(expert.shape)} and {tuple(policy.shape)}."
            )
        return expert, policy
