"""Analytic policy gradient: the return itself, differentiated through policy and environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torchrl.modules.distributions.utils import sample_and_log_prob
from torchrl.objectives import LossModule

from edenrl.objectives.base import LossMixin, require, require_not_negative, require_policy

__all__ = ["APGLoss"]


class APGLoss(LossMixin, LossModule):
    r"""The negative discounted return of rollouts with their autograd graph, minus a discounted entropy bonus.

    Reads rollouts ``[*batch, T]`` (time last) as ``DifferentiableCollector`` yields them. The return is
    ``sum_t D_t r_t`` with the weights ``D_t = gamma ** elapsed_t``; ``elapsed`` counts the steps since the episode or
    the update began, and is an entry of the data.

    - ``mode="segment"``: every step counts. The weight starts at 1 in each update and after each done step, and goes on
      from one segment of an update to the next, so the losses of the segments add up to that of the whole horizon.
    - ``mode="complete"``: steps up to and including the first done one count. Their weights are multiplied by
      ``objective_scale`` where the data has it.

    Reward and entropy have the same weights, so ``entropy_coeff`` keeps its meaning when the segment length changes.
    The gradient reaches the policy through the data. Therefore ``actor_network`` must be the policy that collected it.
    The loss makes no functional copy.

    Outputs: ``loss_objective`` and, with a positive coefficient, ``loss_entropy``. Detached scalars: ``objective``
    (mean weighted return), ``entropy`` (mean over the steps that count, in nats) and ``alive_fraction`` (share of the
    steps that count).

    Args:
        actor_network: the policy that collects.
        gamma: discount per step, in (0, 1]. Default 0.99.
        entropy_coeff: weight of the entropy bonus, at least 0. Default 0: no bonus. The entropy is exact where the
            distribution has a formula (a Gaussian). Otherwise (a squashed Gaussian) it is estimated from one
            reparameterized sample.
        mode: "segment" (default) or "complete".
        reduction: "mean" (default) or "sum" over environments, or "none": one value per environment, ``[*batch]``.

    Raises:
        ValueError: for a setting out of range, a rollout without any step, rewards that are not ``[*batch, T, 1]`` or
            carry no gradient, or a policy without a distribution.

    Source: the differentiable trainer of EmbodiChain, which sums rewards over time but averages the entropy; here both
    are sums.

    Examples:
        >>> from edenrl.collectors import DifferentiableCollector
        >>> from edenrl.envs import PointMass
        >>> from edenrl.modules import gaussian_actor
        >>> actor = gaussian_actor({"observation": 14}, 2, hidden=(8,))
        >>> loss = APGLoss(actor, gamma=0.95)
        >>> for segment in DifferentiableCollector(PointMass(3, seed=0), actor, steps=4).update():
        ...     loss(segment)["loss_objective"].backward()
        >>> actor.module[0].module.mlp[0].weight.grad.shape
        torch.Size([8, 14])
    """

    @dataclass
    class _AcceptedKeys:
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        elapsed: NestedKey = "elapsed"
        objective_scale: NestedKey = "objective_scale"

    _schedulable_buffers = frozenset({"entropy_coeff"})
    actor_network: ProbabilisticTensorDictSequential
    entropy_coeff: Tensor | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        gamma: float = 0.99,
        entropy_coeff: float = 0.0,
        mode: Literal["segment", "complete"] = "segment",
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        require(self, "gamma", gamma, 0 < gamma <= 1, "in (0, 1]")
        require(self, "mode", mode, mode in ("segment", "complete"), "'segment' or 'complete'")
        require_not_negative(self, entropy_coeff=entropy_coeff)
        require_policy(self, "actor_network", actor_network)
        super().__init__(reduction=reduction)
        self.actor_network = actor_network
        self.gamma, self.mode = gamma, mode
        self.register_optional_coeff("entropy_coeff", entropy_coeff or None)

    def _make_in_keys(self) -> list[NestedKey]:
        names = self.tensor_keys
        step = [("next", names.reward), ("next", names.done), names.elapsed, names.objective_scale]
        return [*self.actor_network.in_keys, *step]

    def _finite_keys(self) -> list[NestedKey]:
        # What follows the end of an episode may be NaN, and GradientStep drops what an exploding simulator gives.
        return []

    def _make_out_keys(self) -> list[NestedKey]:
        losses = ["loss_objective"] if self.entropy_coeff is None else ["loss_objective", "loss_entropy"]
        return [*losses, "objective", "entropy", "alive_fraction"]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "policy"."""
        return {"policy": self._trained(self.actor_network)}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of rollouts ``[*batch, T]``."""
        reward = tensordict.get(("next", self.tensor_keys.reward))
        done = tensordict.get(("next", self.tensor_keys.done))
        if reward.shape != (*tensordict.batch_size, 1) or done.shape != reward.shape or tensordict.batch_dims < 1:
            raise ValueError(
                f"APGLoss needs rollouts [*batch, T] with one reward and one done flag a step: expected shape "
                f"{(*tensordict.batch_size, 1)}, got {tuple(reward.shape)} and {tuple(done.shape)}."
            )
        if reward.numel() == 0:
            raise ValueError(
                f"APGLoss was given a rollout with no step: its batch size [*batch, T] is {[*tensordict.batch_size]}. "
                "Collect at least one step of one environment."
            )
        if torch.is_grad_enabled() and not reward.requires_grad:
            raise ValueError(
                "The rewards carry no gradient: collect with DifferentiableCollector, and compute the loss inside its "
                "loop, before the segment is detached."
            )
        weight, alive = self._weights(tensordict, done.squeeze(-1), reward)
        # torch.where instead of a product: a reward after the first done step may be NaN, and NaN * 0 is NaN.
        objective = torch.where(alive, weight * reward.squeeze(-1), 0.0).sum(-1)
        entropy = self._entropy(tensordict)
        counted = alive.to(entropy.dtype)
        out = TensorDict(
            {
                "loss_objective": self._reduce_loss(-objective),
                "objective": objective.detach().mean(),
                "entropy": ((entropy * counted).sum() / counted.sum()).detach(),
                "alive_fraction": counted.mean(),
            }
        )
        if self.entropy_coeff is not None:
            bonus = torch.where(alive, weight * entropy, 0.0).sum(-1)
            out.set("loss_entropy", self._reduce_loss(-self.entropy_coeff * bonus))
        return out

    def _weights(self, tensordict: TensorDictBase, done: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """The weight of every step and whether the step counts, each ``[*batch, T]``."""
        elapsed = tensordict.get(self.tensor_keys.elapsed, None)
        elapsed = _steps_since_done(done) if elapsed is None else elapsed.squeeze(-1)
        weight = self.gamma ** elapsed.to(reward.dtype)
        if self.mode == "segment":
            return weight, torch.ones_like(done)
        scale = tensordict.get(self.tensor_keys.objective_scale, None)
        if scale is not None:
            weight = weight * scale.squeeze(-1)
        return weight, (done.cumsum(-1) - done.long()) == 0

    def _entropy(self, tensordict: TensorDictBase) -> Tensor:
        # Without a bonus the entropy is only a metric and needs no graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_coeff is not None):
            distribution = self.actor_network.get_dist(tensordict.select(*self.actor_network.in_keys))
            try:
                return distribution.entropy()
            except NotImplementedError:
                # Of one draw, scored before any squashing: an action that is saturated cannot be inverted.
                return -sample_and_log_prob(distribution, reparameterize=True)[1]


def _steps_since_done(done: Tensor) -> Tensor:
    """For each step, how many steps ago the rollout began or the last done step ended, ``[*batch, T]``."""
    step = torch.arange(done.shape[-1], device=done.device).expand(done.shape)
    begins = torch.zeros_like(step)
    begins[..., 1:] = (step[..., 1:] * done[..., :-1]).cummax(-1).values
    return step - begins
