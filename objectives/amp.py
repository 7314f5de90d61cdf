"""Adversarial motion prior: the loss of the discriminator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import Discriminator
from edenrl.objectives.base import LossMixin, require_instance, require_not_negative

__all__ = ["AMPLoss"]


class AMPLoss(LossMixin, LossModule):
    r"""Least-squares loss of a discriminator between reference motion and the policy's motion.

    The discriminator gives each window of motion a number ``d``: it learns 1 for reference (expert) windows and -1 for
    the policy's.

    - ``loss_discriminator = 0.5 * (mean (d_expert - 1)^2 + mean (d_policy + 1)^2)``;
    - ``loss_grad_penalty = grad_penalty_coeff * mean |grad d|^2``, the gradient with respect to the normalized expert
      windows.

    Detached scalars: ``d_expert`` and ``d_policy``, the mean outputs, and ``accuracy``, the share of windows whose
    output has the right sign (expert and policy windows weigh the same).

    Both kinds of windows pass through the network together, so a call in training mode is one power iteration of the
    spectral norm.

    Args:
        discriminator: the ``edenrl.modules.Discriminator``. The loss does not change its frame statistics.
        grad_penalty_coeff: weight of the gradient penalty, at least 0. Default 5.
        reduction: "mean" (default) or "sum" over windows, or "none": one value per window, ``[*batch]``.

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

    _schedulable_buffers = frozenset({"grad_penalty_coeff"})
    grad_penalty_coeff: Tensor

    def __init__(
        self,
        discriminator: Discriminator,
        *,
        grad_penalty_coeff: float = 5.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        require_instance(self, "discriminator", discriminator, Discriminator)
        require_not_negative(self, grad_penalty_coeff=grad_penalty_coeff)
        super().__init__(reduction=reduction)
        self.discriminator = discriminator
        self.register_coeff_buffer("grad_penalty_coeff", float(grad_penalty_coeff))

    def _make_in_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.expert_window, self.tensor_keys.policy_window]

    def _make_out_keys(self) -> list[NestedKey]:
        return ["loss_discriminator", "loss_grad_penalty", "d_expert", "d_policy", "accuracy"]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "discriminator"."""
        return {"discriminator": self._trained(self.discriminator)}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of windows in any batch shape."""
        expert, policy = self._windows(tensordict)
        d_expert, d_policy, gradient = self._outputs_and_gradient(expert, policy)
        squared = 0.5 * ((d_expert - 1).square() + (d_policy + 1).square())
        penalty = self.grad_penalty_coeff * gradient.square().sum(-1)
        d_expert, d_policy = d_expert.detach(), d_policy.detach()
        correct = 0.5 * ((d_expert > 0).to(squared.dtype) + (d_policy < 0).to(squared.dtype))
        return TensorDict(
            {
                "loss_discriminator": self._reduce_loss(squared, tensordict),
                "loss_grad_penalty": self._reduce_loss(penalty, tensordict),
                "d_expert": d_expert.mean(),
                "d_policy": d_policy.mean(),
                "accuracy": correct.mean(),
            }
        )

    def _outputs_and_gradient(self, expert: Tensor, policy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both outputs, ``[*batch]`` each, and the gradient at the expert windows, ``[*batch, K * f]``."""
        expert, policy = self.discriminator.normalize(torch.stack([expert, policy])).detach()

        def outputs(expert: Tensor) -> Tensor:
            return self.discriminator.network(torch.stack([expert, policy])).squeeze(-1)

        derived: Any = torch.func.vjp(outputs, expert)
        both, pull_back = derived
        # The gradient of the expert outputs alone.
        (gradient,) = pull_back(torch.stack([torch.ones_like(both[0]), torch.zeros_like(both[1])]))
        return both[0], both[1], gradient

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
