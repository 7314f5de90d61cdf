"""Analytic policy gradient: the return itself, differentiated through policy and environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

__all__ = ["APGLoss"]


class APGLoss(LossModule):
    r"""Minus the discounted return of rollouts that still carry the graph, plus a discounted entropy bonus.

    Reads rollouts ``[*batch, T]``, time last, as ``DifferentiableCollector`` yields them. Each step counts with the
    weight ``D_t = gamma ** elapsed_t``, where ``elapsed`` counts the steps since the episode or the update began:

    - ``mode="segment"``: ``sum_t D_t r_t``. D is 1 at the start of an update and after a done step, and is carried from
      segment to segment of one update, so that their losses add up to that of the whole horizon.
    - ``mode="complete"``: only rewards up to and including the first done step count, ``sum_t gamma^t r_t``, times
      ``objective_scale`` where the data has it.

    Reward and entropy share the same weights: a coefficient keeps its meaning when the segment length changes. Losses
    are averaged over environments. The gradient reaches the policy through the data, so the policy that collected must
    be this one; the loss keeps it as it is (no functional copy).

    Outputs: ``loss_objective``, ``loss_entropy`` (when its coefficient is positive); detached scalars: ``objective``
    (mean weighted return), ``entropy`` (mean over counted steps, in nats), ``alive_fraction`` (share of counted steps).

    Args:
        actor_network: the policy that collects.
        gamma: discount per step, in (0, 1]. Default 0.99.
        entropy_coeff: weight of the entropy bonus. Default 0. The entropy is exact where the distribution knows it (a
            Gaussian), a reparameterized one-sample estimate otherwise (a squashed Gaussian).
        mode: "segment" (default) or "complete".
        reduction: "mean" (default) or "sum" over environments, or "none": one value per environment, ``[*batch]``.

    Raises:
        ValueError: for a setting out of range, rewards that are not ``[*batch, T, 1]`` or carry no gradient, or a
            policy without a distribution.

    Source: the differentiable trainer of EmbodiChain. It averages the entropy over time while it sums the rewards; here
    both are sums.

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

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    rollout_kind: ClassVar[str] = "differentiable"
    _schedulable_buffers = frozenset({"entropy_coeff"})

    actor_network: ProbabilisticTensorDictSequential
    entropy_coeff: Tensor | None
    _in_keys: list[NestedKey] | None
    _out_keys: list[NestedKey] | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        gamma: float = 0.99,
        entropy_coeff: float = 0.0,
        mode: Literal["segment", "complete"] = "segment",
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        for name, value, good, wanted in (
            ("gamma", gamma, 0 < gamma <= 1, "in (0, 1]"),
            ("entropy_coeff", entropy_coeff, entropy_coeff >= 0, ">= 0"),
            ("mode", mode, mode in ("segment", "complete"), "'segment' or 'complete'"),
            ("reduction", reduction, reduction in ("mean", "sum", "none"), "'mean', 'sum' or 'none'"),
        ):
            if not good:
                raise ValueError(f"APGLoss needs {name} {wanted}, got {value!r}.")
        if not hasattr(actor_network, "get_dist"):
            raise ValueError(
                f"APGLoss needs a probabilistic policy such as gaussian_actor's, got {type(actor_network).__name__}. "
                "To act by its mean, collect with exploration_type=DETERMINISTIC."
            )
        super().__init__()
        self.actor_network = actor_network
        self.gamma, self.mode, self.reduction = gamma, mode, reduction
        self.register_buffer("entropy_coeff", torch.tensor(float(entropy_coeff)) if entropy_coeff > 0 else None)
        self._in_keys = self._out_keys = None

    def __setattr__(self, name: str, value: Any) -> None:
        # Absent rather than zero: the coefficient of a term that was not built must not be assigned in vain.
        if name == "entropy_coeff" and self._buffers.get(name, value) is None:
            raise AttributeError(
                "This APGLoss has no entropy bonus; build it with entropy_coeff > 0 to change it later."
            )
        super().__setattr__(name, value)

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` reads."""
        if self._in_keys is None:
            names = self.tensor_keys
            ended: list[NestedKey] = [("next", names.reward), ("next", names.done)]
            self._in_keys = [*self.actor_network.in_keys, *ended, names.elapsed, names.objective_scale]
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` returns."""
        if self._out_keys is None:
            bonus: list[NestedKey] = [] if self.entropy_coeff is None else ["loss_entropy"]
            self._out_keys = ["loss_objective", *bonus, "objective", "entropy", "alive_fraction"]
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys = values

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        self._in_keys = None  # no estimator; the keys were renamed

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "policy"."""
        return {"policy": [p for p in self.actor_network.parameters() if p.requires_grad]}

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
        if torch.is_grad_enabled() and not reward.requires_grad:
            raise ValueError(
                "The rewards carry no gradient: collect with DifferentiableCollector, and compute the loss inside its "
                "loop, before the segment is detached."
            )
        weight, alive = self._weights(tensordict, done.squeeze(-1), reward)
        # where: a reward that does not count may be anything, and reaches nothing.
        objective = torch.where(alive, weight * reward.squeeze(-1), 0.0).sum(-1)
        entropy = self._entropy(tensordict)
        counted = alive.to(entropy.dtype)
        out = TensorDict(
            {
                "loss_objective": self._reduce(-objective),
                "objective": objective.detach().mean(),
                "entropy": ((entropy * counted).sum() / counted.sum()).detach(),
                "alive_fraction": counted.mean(),
            }
        )
        if self.entropy_coeff is not None:
            bonus = torch.where(alive, weight * entropy, 0.0).sum(-1)
            out.set("loss_entropy", self._reduce(-self.entropy_coeff * bonus))
        return out

    def _weights(self, tensordict: TensorDictBase, done: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
        """The discount and scale of every step, and whether it counts, ``[*batch, T]`` each."""
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
        # Without a bonus it is a metric only and needs no graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_coeff is not None):
            distribution = self.actor_network.get_dist(tensordict.select(*self.actor_network.in_keys))
            try:
                return distribution.entropy()
            except NotImplementedError:
                return -distribution.log_prob(distribution.rsample())

    def _reduce(self, values: Tensor) -> Tensor:
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()


def _steps_since_done(done: Tensor) -> Tensor:
    """For each step the number of steps since the start or the last done one, ``[*batch, T]``."""
    step = torch.arange(done.shape[-1], device=done.device).expand(done.shape)
    begins = torch.zeros_like(step)
    begins[..., 1:] = (step[..., 1:] * done[..., :-1]).cummax(-1).values
    return step - begins
