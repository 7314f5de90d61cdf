"""Proximal policy optimization with the exact KL divergence of Gaussian policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictParams, dispatch
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.objectives import ClipPPOLoss

from edenrl.modules import PRE_SQUASH, merge_moments, several_processes, squashed_log_prob
from edenrl.objectives.base import LossMixin, require, require_not_negative

__all__ = ["PPOLoss", "gaussian_kl"]


def gaussian_kl(old_loc: Tensor, old_scale: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
    """KL(old || new) of diagonal Gaussians, summed over the last dimension.

    Examples:
        >>> zero, one = torch.zeros(1), torch.ones(1)
        >>> float(gaussian_kl(zero, one, 2 * one, one))
        2.0
    """
    return (
        (scale / old_scale).log() + (old_scale.square() + (old_loc - loc).square()) / (2 * scale.square()) - 0.5
    ).sum(-1)


class PPOLoss(LossMixin, ClipPPOLoss):
    r"""TorchRL's ``ClipPPOLoss`` with exact KL, value clipping, an action bound and complete metrics.

    Differences from the parent:

    - the log-probability of a squashed action is computed from the sample before the tanh, which the actor stored as
      ``pre_squash_action``. The parent inverts the tanh, which fails where it saturates;
    - ``kl`` is the exact KL(old || new) of diagonal Gaussians, from the ``loc`` and ``scale`` stored at collection. For
      other policies it is the sampled estimate;
    - ``explained_variance`` compares the values stored at collection with their targets;
    - an optional penalty keeps the mean action inside [-1, 1];
    - the value loss is by default a clipped squared error;
    - metrics are scalars for every batch shape, and ``out_keys`` lists exactly what is returned;
    - ``parameter_groups`` names the trained parameters;
    - ``normalize_advantage`` takes its statistics over the mini-batches of all processes that train together.

    Outputs: ``loss_objective``, ``loss_critic``, ``loss_entropy`` and ``loss_action_bound`` (when its coefficient is
    positive), weighted and meant to be summed; the other entries are detached scalars.

    Args:
        actor_network: probabilistic actor. If it is Gaussian, the data must hold its ``loc`` and ``scale`` from
            collection; for a squashed one from ``gaussian_actor`` also ``pre_squash_action``.
        critic_network: writes ``state_value``; ``None`` trains the policy alone.
        clip_epsilon: clip range of the probability ratio, in (0, 1), or a pair (low, high).
        entropy_coeff: weight of the entropy bonus.
        critic_coeff: weight of the value loss; 0 leaves the critic out.
        loss_critic_type: "l2", "l1" or "smooth_l1".
        clip_value: clip the change of the value to ``clip_epsilon`` (True), to a given range, or not at all (False or
            None). The range is in units of the value, so True holds back the critic where returns are large:
            ``value_clip_fraction``, the share of values that were clipped, is then near 1. Give a range that fits the
            returns, normalize the reward, or switch it off. Default True.
        action_bound_coeff: weight of mean(relu(loc - 1)^2) + mean(relu(-loc - 1)^2), on the mean before any tanh.
        kwargs: further options of the parent, such as ``normalize_advantage``, ``reduction`` or ``functional``.

    Raises:
        ValueError: for a clip range outside (0, 1), a negative coefficient, ``separate_losses`` without ``functional``,
            or an advantage that is not ``[*batch, 1]``.
        KeyError: for a batch without "advantage". Run ``GAE`` on the whole rollout first. The parent would compute the
            advantage from the mini-batch, which is wrong when it is shuffled.

    Source: Schulman et al. 2017, arXiv:1707.06347; value clipping and adaptive KL as in rsl_rl.

    Examples:
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import gaussian_actor, value_critic
        >>> actor, critic = gaussian_actor({"observation": 3}, 2), value_critic({"observation": 3})
        >>> loss = PPOLoss(actor, critic)
        >>> data = actor(TensorDict(observation=torch.randn(8, 3), batch_size=[8])).detach()
        >>> data = critic(data).detach().update({"advantage": torch.randn(8, 1), "value_target": torch.randn(8, 1)})
        >>> out = loss(data)
        >>> round(float(out["kl"]), 6)
        0.0
        >>> sum(value for name, value in out.items() if name.startswith("loss_")).backward()
    """

    @dataclass
    class _AcceptedKeys(ClipPPOLoss._AcceptedKeys):
        loc: NestedKey = "loc"
        scale: NestedKey = "scale"
        pre_squash_action: NestedKey = PRE_SQUASH

    _schedulable_buffers = frozenset({"action_bound_coeff"})

    actor_network: TensorDictModule
    critic_network: TensorDictModule
    actor_network_params: TensorDictParams
    critic_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    target_critic_network_params: TensorDictParams

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_coeff: float = 0.01,
        critic_coeff: float = 1.0,
        loss_critic_type: str = "l2",
        clip_value: bool | float | None = True,
        action_bound_coeff: float = 0.0,
        **kwargs: Any,
    ) -> None:
        require_not_negative(
            self, entropy_coeff=entropy_coeff, critic_coeff=critic_coeff, action_bound_coeff=action_bound_coeff
        )
        if not isinstance(clip_value, bool) and clip_value is not None:
            require(self, "clip_value", clip_value, clip_value > 0, "True, False, None or a positive range")
        if isinstance(clip_epsilon, (int, float)):
            wanted = "in (0, 1) or, for a wider upper range, as a pair (low, high)"
            require(self, "clip_epsilon", clip_epsilon, 0 < clip_epsilon < 1, wanted)
        if kwargs.get("separate_losses") and kwargs.get("functional") is False:
            raise ValueError(
                "separate_losses=True needs functional=True. Without it the value loss would train a shared trunk."
            )
        super().__init__(
            actor_network,
            critic_network,
            clip_epsilon=clip_epsilon,
            entropy_coeff=entropy_coeff,
            critic_coeff=None if critic_network is None else critic_coeff,
            loss_critic_type=loss_critic_type,
            clip_value=clip_value,
            log_explained_variance=False,
            **kwargs,
        )
        self.register_optional_coeff("action_bound_coeff", action_bound_coeff or None)
        self._distribution: torch.distributions.Distribution | None = None

    def _make_in_keys(self) -> list[NestedKey]:
        names = self.tensor_keys
        keys = [*self.actor_network.in_keys, names.advantage]
        for key in (names.action, names.sample_log_prob):
            keys += key if isinstance(key, list) else [key]
        if self._is_gaussian:
            keys += [names.loc, names.scale]
        if self._is_squashed:
            keys.append(names.pre_squash_action)
        if self._has_critic:
            keys += [*self.critic_network.in_keys, names.value, names.value_target]
        return list(dict.fromkeys(keys))

    def _make_out_keys(self) -> list[NestedKey]:
        keys = ["loss_objective", "clip_fraction", "kl_approx", "ESS", "max_ratio", "mean_ratio", "kl"]
        if self.entropy_bonus:
            keys += ["loss_entropy", "entropy"]
        if self._has_critic:
            keys += ["loss_critic", "explained_variance"]
            if self.clip_value is not None:
                keys.append("value_clip_fraction")
        if self.action_bound_coeff is not None:
            keys.append("loss_action_bound")
        return keys

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by group, "policy" and "critic"; parameters of a shared trunk count as "policy"."""
        groups = {"policy": self._trained(self._parameters_of("actor_network"))}
        if self._has_critic:
            shared = {id(p) for p in groups["policy"]}
            critic = self._trained(self._parameters_of("critic_network"))
            groups["critic"] = [p for p in critic if id(p) not in shared]
        return groups

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of a batch of any shape."""
        if self.tensor_keys.advantage not in tensordict.keys(include_nested=True):
            raise KeyError(
                f"The batch has no {self.tensor_keys.advantage!r}. Run GAE on the rollout [N, T] before it is split "
                "into mini-batches, or rename the entry with set_keys(advantage=...)."
            )
        advantage = tensordict.get(self.tensor_keys.advantage)
        if advantage.shape[-1:] != (1,) or advantage.shape[:-1] != tensordict.batch_size:
            raise ValueError(
                f"{type(self).__name__} needs one advantage per sample: {self.tensor_keys.advantage!r} of shape "
                f"{(*tensordict.batch_size, 1)}, got {tuple(advantage.shape)}. Mix several heads into one before, or "
                "add the trailing dimension with unsqueeze(-1)."
            )
        try:
            out = super().forward(tensordict)
            new = self._gaussian_parameters(self._distribution)
        finally:
            self._distribution = None
        with torch.no_grad():
            out.set("ESS", out.get("ESS").mean())
            out.set("kl", out.get("kl_approx") if new is None else self._exact_kl(tensordict, *new))
            if self._has_critic:
                out.set("explained_variance", self._explained_variance(tensordict))
        if self._has_critic and self.reduction == "none" and out.get("loss_critic").ndim > tensordict.ndim:
            out.set("loss_critic", out.get("loss_critic").mean(-1))  # several value heads, one loss per sample
        elif self._has_critic and self.reduction == "sum":  # the mean over value heads, the sum over samples
            out.set("loss_critic", out.get("loss_critic") / tensordict.get(self.tensor_keys.value_target).shape[-1])
        if self.action_bound_coeff is not None:
            out.set("loss_action_bound", self._action_bound(tensordict, new))
        return out

    def _standardize_advantage(self, advantage: Tensor, tensordict: TensorDictBase) -> Tensor:
        masked = tensordict.get("shifted_valid", None) is not None
        if not several_processes() or masked or self.normalize_advantage_exclude_dims:
            return super()._standardize_advantage(advantage, tensordict)
        own = advantage.double()
        count, mean, var = merge_moments(own.numel(), own.mean(), own.var(correction=0))
        # The same floor as the parent's.
        spread = (var * count / (count - 1).clamp_min(1)).sqrt().clamp_min(torch.finfo(torch.float).resolution)
        return ((own - mean) / spread).to(advantage.dtype)

    @property
    def _is_gaussian(self) -> bool:
        """Whether the policy has the exact KL, which reads the stored ``loc`` and ``scale``."""
        # The names in the data may differ from those that the policy writes.
        written, names = set(self.actor_network.out_keys), self.tensor_keys
        return {"loc", "scale"} <= written or {names.loc, names.scale} <= written

    @property
    def _is_squashed(self) -> bool:
        return PRE_SQUASH in self.actor_network.out_keys

    def _get_cur_log_prob(self, tensordict: TensorDictBase, params: Any = None) -> tuple[Any, Any, bool]:
        log_prob, distribution, is_composite = super()._get_cur_log_prob(tensordict, params)
        if self._is_squashed:
            # The parent inverts the tanh, which says nothing where it saturates.
            log_prob = self._action_log_prob(distribution, tensordict)
        return log_prob, distribution, is_composite

    def _action_log_prob(self, distribution: Any, tensordict: TensorDictBase) -> Any:
        """The log-probability of the actions of a batch; of squashed ones, from the sample before the tanh."""
        names = self.tensor_keys
        if not self._is_squashed:
            return distribution.log_prob(tensordict.get(names.action))
        sample = tensordict.get(names.pre_squash_action, None)
        if sample is None:
            raise KeyError(
                f"The policy squashes its actions; the batch has no {names.pre_squash_action!r}, the samples before "
                "the tanh, which the policy wrote at collection. Keep the entry in the data, or rename it with "
                "set_keys(pre_squash_action=...)."
            )
        return squashed_log_prob(distribution, sample)

    def _log_weight(self, tensordict: TensorDictBase, adv_shape: torch.Size) -> tuple[Tensor, Any, Tensor, Any]:
        outputs = super()._log_weight(tensordict, adv_shape)
        # Stored for forward(), so that the actor runs only once.
        self._distribution = outputs[1]
        return outputs

    @staticmethod
    def _gaussian_parameters(distribution: Any) -> tuple[Tensor, Tensor] | None:
        """Mean and scale of a diagonal Gaussian; a tanh is a bijection and leaves the KL as it is."""
        if getattr(distribution, "tanh_loc", False):
            return None  # its mean is not the ``loc`` that was stored
        if isinstance(distribution, IndependentNormal):
            return distribution.base_dist.loc, distribution.base_dist.scale
        if isinstance(distribution, TanhNormal):
            return distribution.loc, distribution.scale
        return None

    def _exact_kl(self, tensordict: TensorDictBase, loc: Tensor, scale: Tensor) -> Tensor:
        old_loc = tensordict.get(self.tensor_keys.loc, None)
        old_scale = tensordict.get(self.tensor_keys.scale, None)
        if old_loc is None or old_scale is None:
            raise KeyError(
                f"The exact KL needs the collection-time {self.tensor_keys.loc!r} and {self.tensor_keys.scale!r}; the "
                f"batch has {sorted(map(str, tensordict.keys()))}. Keep both in the data, or rename them with set_keys."
            )
        return self._reduce_loss(gaussian_kl(old_loc, old_scale, loc, scale), tensordict, reduction="mean")

    def _explained_variance(self, tensordict: TensorDictBase) -> Tensor:
        value, target = tensordict.get(self.tensor_keys.value, None), tensordict.get(self.tensor_keys.value_target)
        if value is None or value.shape != target.shape:
            raise KeyError(
                f"explained_variance needs the collection-time {self.tensor_keys.value!r} in the shape of the targets "
                f"{tuple(target.shape)}, got {None if value is None else tuple(value.shape)}; let the advantage "
                "estimator write it, or rename it with set_keys(value=...)."
            )
        variance, rest = target.var(correction=0), (target - value).var(correction=0)
        # Targets that do not vary leave nothing to explain.
        known = variance > torch.finfo(variance.dtype).tiny
        return torch.where(known, 1 - rest / variance.where(known, 1.0), torch.zeros_like(variance))

    def _action_bound(self, tensordict: TensorDictBase, new: tuple[Tensor, Tensor] | None) -> Tensor:
        if new is None:
            raise ValueError("action_bound_coeff > 0 needs a Gaussian actor; set action_bound_coeff=0.")
        excess = (new[0].abs() - 1).relu().square().mean(-1)
        return self._reduce_loss(self.action_bound_coeff * excess, tensordict)
