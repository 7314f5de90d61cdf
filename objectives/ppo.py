"""Proximal policy optimization with the exact KL divergence of Gaussian policies."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictParams, dispatch
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, TanhNormal
from torchrl.objectives import ClipPPOLoss, ValueEstimators

from edenrl.modules import PRE_SQUASH, merge_moments, several_processes, squashed_log_prob
from edenrl.objectives.base import LossMixin, require, require_critic, require_not_negative, require_policy
from edenrl.objectives.explained_variance import explained_variance
from edenrl.objectives.gae import GAE

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
    - ``explained_variance`` is that of the batch: it compares the values stored at collection with their targets. The
      training scripts log that of the whole rollout;
    - an optional penalty keeps the mean action inside [-1, 1];
    - the value loss is by default a clipped squared error;
    - metrics are scalars for every batch shape, and ``out_keys`` lists exactly what is returned;
    - ``parameter_groups`` names the trained parameters;
    - ``normalize_advantage`` takes its statistics over the mini-batches of all processes that train together.

    Outputs: ``loss_objective``, ``loss_critic``, ``loss_entropy`` and ``loss_action_bound`` (when its coefficient is
    positive), weighted and meant to be summed; the other entries are detached scalars.

    Args:
        actor_network: probabilistic actor. If it is Gaussian, the data should hold its ``loc`` and ``scale`` from
            collection (otherwise ``kl`` is an estimate, with a warning); for a squashed one from ``gaussian_actor`` it
            must hold ``pre_squash_action``.
        critic_network: writes ``state_value``; ``None`` trains the policy alone.
        clip_epsilon: clip range of the probability ratio, in (0, 1), or a pair (low, high).
        entropy_coeff: weight of the entropy bonus.
        critic_coeff: weight of the value loss; 0 leaves the critic out.
        loss_critic_type: "l2", "l1" or "smooth_l1".
        clip_value: clip the change of the value to ``clip_epsilon`` (True; of a pair, to the smaller one), to a given
            range, or not at all (False or None). The range is in units of the value, so True holds back the critic
            where returns are large: ``value_clip_fraction``, the share of values that were clipped, is then near 1.
            Give a range that fits the returns, normalize the reward, or switch it off. Default True.
        action_bound_coeff: weight of mean(relu(loc - 1)^2) + mean(relu(-loc - 1)^2), on the mean before any tanh.
        log_explained_variance: return ``explained_variance``. Default True. The training scripts switch it off.
        kwargs: further options of the parent, such as ``normalize_advantage``, ``reduction`` or ``functional``.

    Raises:
        ValueError: for an actor without a distribution, a critic that is no ``TensorDictModule`` or is a policy, a clip
            range outside (0, 1), a negative coefficient, ``separate_losses`` without ``functional``, or an advantage
            that is neither ``[*batch, 1]`` nor, for several agents, ``[*batch, agents, 1]``.
        KeyError: for a flat batch ``[B]`` without "advantage". Run ``GAE`` on the whole rollout first: an advantage
            that is computed from shuffled steps is wrong. In a rollout ``[*, T]`` that has the next entries the loss
            estimates the advantage itself, with the estimator of ``make_value_estimator`` (default ``GAE``). A batch
            ``[T]`` is a rollout if its dimension is named "time", or if its entries are passed by keyword.

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
        log_explained_variance: bool = True,
        **kwargs: Any,
    ) -> None:
        require_policy(self, "actor_network", actor_network)
        if critic_network is not None:
            require_critic(self, "critic_network", critic_network)
        require_not_negative(
            self, entropy_coeff=entropy_coeff, critic_coeff=critic_coeff, action_bound_coeff=action_bound_coeff
        )
        if not isinstance(clip_value, bool) and clip_value is not None:
            require(self, "clip_value", clip_value, clip_value > 0, "True, False, None or a positive range")
        if isinstance(clip_epsilon, (int, float)):
            wanted = "in (0, 1) or, for a wider upper range, as a pair (low, high)"
            require(self, "clip_epsilon", clip_epsilon, 0 < clip_epsilon < 1, wanted)
        elif isinstance(clip_epsilon, (tuple, list)):
            good = len(clip_epsilon) == 2 and 0 < clip_epsilon[0] < 1 and 0 < clip_epsilon[1] < math.inf
            require(self, "clip_epsilon", clip_epsilon, good, "as a pair (low, high) with 0 < low < 1 and 0 < high")
            if clip_value is True:
                clip_value = min(clip_epsilon)
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
            log_explained_variance=False,  # TorchRL's is that of the new values
            **kwargs,
        )
        self.register_optional_coeff("action_bound_coeff", action_bound_coeff or None)
        self._explains_variance = self._has_critic and log_explained_variance
        self._distribution: torch.distributions.Distribution | None = None
        self._estimated: TensorDictBase | None = None
        self._keyword_call = False

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
        return list(dict.fromkeys([*keys, *self._estimator_keys()]))

    def _estimator_keys(self) -> list[NestedKey]:
        """What the value estimator reads of the next step, for a rollout that has no advantage yet."""
        if self.critic_network is None:
            return []
        names = self.tensor_keys
        keys = [*self.actor_network.in_keys, *self.critic_network.in_keys, names.reward, names.done, names.terminated]
        return [unravel_key(("next", key)) for key in dict.fromkeys(keys)]

    def _read_keys(self) -> list[NestedKey]:
        unread = self._estimator_keys()
        return [key for key in self.in_keys if key not in unread]

    def _make_out_keys(self) -> list[NestedKey]:
        keys = ["loss_objective", "clip_fraction", "kl_approx", "ESS", "max_ratio", "mean_ratio", "kl"]
        if self.entropy_bonus:
            keys += ["loss_entropy", "entropy"]
        if self._has_critic:
            keys.append("loss_critic")
            if self._explains_variance:
                keys.append("explained_variance")
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

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> PPOLoss:
        """Builds the estimator for rollouts without an advantage; see TorchRL's losses.

        Args:
            value_type: an estimator of TorchRL, as a name, member, class or object. Default: this library's ``GAE``.
            hyperparams: its options, such as ``gamma`` (default 0.99) and ``lmbda`` (default 0.95).

        Returns:
            The loss.
        """
        if value_type is None:
            value_type = self.default_value_estimator
        if isinstance(value_type, str) and value_type.lower() == "gae":
            value_type = ValueEstimators.GAE
        if value_type is ValueEstimators.GAE:
            defaults = {"gamma": 0.99, "lmbda": 0.95, "value_network": self.critic_network}
            super().make_value_estimator(GAE, **{**defaults, **hyperparams})
            self.value_type = ValueEstimators.GAE
            self._forward_value_estimator_keys()
        else:
            super().make_value_estimator(value_type, **hyperparams)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the losses; see ``LossMixin``."""
        # Tensors that are passed by keyword cannot say which dimension is time.
        self._keyword_call = not args
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._keyword_call = False

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of a batch of any shape."""
        if self.tensor_keys.advantage not in tensordict.keys(include_nested=True):
            self._require_rollout(tensordict)
        try:
            out = super().forward(tensordict)
            new = self._gaussian_parameters(self._distribution)
            if self._estimated is not None:
                tensordict = self._estimated
        finally:
            self._distribution = self._estimated = None
        with torch.no_grad():
            out.set("ESS", out.get("ESS").mean())
            exact = None if new is None else self._exact_kl(tensordict, *new)
            out.set("kl", out.get("kl_approx") if exact is None else exact)
            if self._explains_variance:
                out.set("explained_variance", self._explained_variance(tensordict))
        heads = tensordict.get(self.tensor_keys.value_target).shape[-1] if self._has_critic else 1
        if heads > 1 and self.reduction == "none":
            out.set("loss_critic", out.get("loss_critic").mean(-1))  # one loss per sample
        elif heads > 1 and self.reduction == "sum":
            out.set("loss_critic", out.get("loss_critic") / heads)
        if self.action_bound_coeff is not None:
            out.set("loss_action_bound", self._action_bound(tensordict, new))
        return out

    def _require_rollout(self, batch: TensorDictBase) -> None:
        """Raises unless the batch is a rollout whose advantage can be estimated."""
        names, advice = self.tensor_keys, ""
        if self._estimator_keys():
            held = set(batch.keys(include_nested=True))
            needed = [unravel_key(key) for key in self.critic_network.in_keys]
            needed += [unravel_key(("next", key)) for key in (*needed, names.reward, names.done)]
            absent = [key for key in needed if key not in held]
            in_time = batch.ndim > 1 or "time" in batch.names or self._keyword_call
            if in_time and not absent:
                return
            problem = f"lacks {absent}" if in_time else f"{tuple(batch.shape)} has no dimension named 'time'"
            advice = f" The loss estimates it itself in a whole rollout [*, T] with {needed}; this batch {problem}."
        raise KeyError(
            f"The batch has no {names.advantage!r}. Run GAE on the rollout [N, T] before it is split into "
            f"mini-batches, or rename the entry with set_keys(advantage=...).{advice}"
        )

    def _maybe_normalize_advantage(self, advantage: Tensor, tensordict: TensorDictBase, *, update_norm: bool) -> Tensor:
        ndim = tensordict.ndim
        if advantage.shape[-1:] != (1,) or advantage.ndim <= ndim or advantage.shape[:ndim] != tensordict.shape:
            raise ValueError(
                f"{type(self).__name__} needs one advantage per sample (or per agent of a sample, [*batch, agents, "
                f"1]): {self.tensor_keys.advantage!r} of shape {(*tensordict.batch_size, 1)}, got "
                f"{tuple(advantage.shape)}. Mix several heads into one before, or add the trailing dimension with "
                "unsqueeze(-1), without which samples and advantages form an outer product."
            )
        if update_norm:  # the parent has just estimated the advantage, on its copy of the batch
            self._estimated = tensordict.copy()
        normalized: Tensor = super()._maybe_normalize_advantage(advantage, tensordict, update_norm=update_norm)
        return normalized

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
        written, names = set(self._written), self.tensor_keys
        return {"loc", "scale"} <= written or {names.loc, names.scale} <= written

    @property
    def _is_squashed(self) -> bool:
        return PRE_SQUASH in self._written

    @property
    def _written(self) -> list[NestedKey]:
        """What the policy writes; one that is no TensorDict module but has ``get_dist`` does not say."""
        return getattr(self.actor_network, "out_keys", [])

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

    def _exact_kl(self, tensordict: TensorDictBase, loc: Tensor, scale: Tensor) -> Tensor | None:
        """KL(old || new), or ``None`` for data that never held the parameters of the old distribution."""
        old_loc = tensordict.get(self.tensor_keys.loc, None)
        old_scale = tensordict.get(self.tensor_keys.scale, None)
        if old_loc is None and old_scale is None:
            warnings.warn(
                f"The batch has neither {self.tensor_keys.loc!r} nor {self.tensor_keys.scale!r}: 'kl' is the sampled "
                "estimate, which is noisy. Keep both in the data, or rename them with set_keys, for the exact KL.",
                stacklevel=2,
            )
            return None
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
        return explained_variance(value, target)

    def _action_bound(self, tensordict: TensorDictBase, new: tuple[Tensor, Tensor] | None) -> Tensor:
        if new is None:
            raise ValueError("action_bound_coeff > 0 needs a Gaussian actor; set action_bound_coeff=0.")
        excess = (new[0].abs() - 1).relu().square().mean(-1)
        return self._reduce_loss(self.action_bound_coeff * excess, tensordict)
