"""Squashed actions that remember the sample before the tanh."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, dispatch, set_skip_existing
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor
from torchrl.modules import (
    ProbabilisticActor,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    TanhNormal,
)

__all__ = ["PRE_SQUASH", "SquashedActor", "squashed_log_prob"]

PRE_SQUASH = "pre_squash_action"


def squashed_log_prob(distribution: TanhNormal, pre_squash: Tensor) -> Tensor:
    """Log-probability of a squashed action, from the sample before the tanh.

    From the action alone it cannot be computed where the tanh saturates: many samples give the same rounded action.

    Args:
        distribution: the policy's distribution.
        pre_squash: samples before the tanh, ``[*batch, a]``.

    Returns:
        Log-probabilities of the squashed actions ``[*batch]``.

    Examples:
        >>> import torch
        >>> distribution = TanhNormal(torch.tensor([20.0]), torch.tensor([1.0]))
        >>> round(float(squashed_log_prob(distribution, torch.tensor([20.0]))), 3)  # that of a Gaussian, + 40 - 2 log 2
        37.695
    """
    squash = distribution.transforms[0]
    slope = squash.log_abs_det_jacobian(pre_squash, squash(pre_squash))
    density: Tensor = distribution.base_dist.log_prob(pre_squash)
    return density - slope.sum(-1)


class _SquashedSampler(SafeProbabilisticModule):
    @property
    def out_keys(self) -> list[NestedKey]:
        return [*super().out_keys, PRE_SQUASH]

    @dispatch(auto_batch_size=False)
    @set_skip_existing(None)
    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        _requires_sample: bool = True,
    ) -> TensorDictBase:
        """Writes the action, its log-probability and the sample before the tanh."""
        if not _requires_sample:
            return super().forward(tensordict, tensordict_out, _requires_sample=False)
        kind = interaction_type() or self.default_interaction_type
        distribution = self.get_dist(tensordict)
        if kind not in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
            out = super().forward(tensordict, tensordict_out)
            return out.set(PRE_SQUASH, distribution.transforms[0].inv(out.get(self.dist_sample_keys[0])))
        base = distribution.base_dist
        sample = base.rsample() if kind is InteractionType.RANDOM else base.mean
        out = tensordict if tensordict_out is None else tensordict_out
        out.set(self.dist_sample_keys[0], distribution.transforms[0](sample))
        return out.set(self.log_prob_key, squashed_log_prob(distribution, sample)).set(PRE_SQUASH, sample)


class SquashedActor(ProbabilisticActor):
    """An actor whose Gaussian is squashed into a box by a tanh.

    Writes ``action`` and ``action_log_prob`` and, as ``pre_squash_action``, the sample before the tanh.

    Args:
        module: writes ``loc`` and ``scale``.
        bounds: the box, "low" and "high" ``[a]``.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import GaussianMLP, SquashedActor
        >>> net = TensorDictModule(GaussianMLP(3, 2), in_keys=["observation"], out_keys=["loc", "scale"])
        >>> actor = SquashedActor(net, {"low": -torch.ones(2), "high": torch.ones(2)})
        >>> data = actor(TensorDict(observation=torch.zeros(5, 3), batch_size=[5]))
        >>> torch.allclose(data["action"], data["pre_squash_action"].tanh(), atol=1e-5)
        True
    """

    def __init__(self, module: TensorDictModule, bounds: dict[str, Any]) -> None:
        sampler = _SquashedSampler(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs=bounds,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        )
        # Not ProbabilisticActor's own constructor, which would make the sampler.
        SafeProbabilisticTensorDictSequential.__init__(self, module, sampler)
