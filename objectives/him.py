"""Hybrid internal model: the losses of the estimator, and PPO with terms that make actor and critic symmetric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import HIMEstimator, SignedPermutation, check_mirror_widths, network_widths, sinkhorn
from edenrl.objectives.base import LossMixin, require, require_instance
from edenrl.objectives.ppo import PPOLoss

__all__ = ["HIMEstimatorLoss", "HIMLoss"]


class HIMEstimatorLoss(LossMixin, LossModule):
    r"""Losses of a ``HIMEstimator``: velocity regression, and swapped prototype prediction (SwAV) for the latent.

    ``loss_estimation`` is the mean squared error of the velocity that the history gives against the one in the *next*
    critic observation. ``loss_swap`` is ``-0.5 mean(q_s log p_t + q_t log p_s)`` over batch and prototypes: ``q`` are
    the assignments (``sinkhorn``, without gradient) and ``p`` the softmax predictions of history (s) and target (t). At
    uniform scores it is ``log(K) / K`` for K prototypes. Prototypes are brought to unit norm in place first.

    The next critic observation of an episode that ended must be its true last one. Assignments are balanced over the
    samples of one call, whatever its batch shape; with several processes, each balances its own.

    Outputs: ``loss_swap``, ``loss_estimation``. Detached scalars: ``velocity_error`` is the root mean square error in
    the scale of the critic observation. ``velocity_error_relative`` divides it by the standard deviation of the true
    velocity; a constant prediction achieves 1. ``prototype_entropy`` is the entropy, in nats, of how often each
    prototype has the highest score for a history; 0 means that all histories choose the same prototype, log K that all
    prototypes are used equally. ``latent_variance`` is the variance of the history latents, summed over entries; 0
    means collapse.

    Args:
        estimator: the estimator, kept as it is (no functional copy).
        temperature: of the softmax. Default 3.0.
        sinkhorn_eps: see ``sinkhorn``. Default 0.05.
        sinkhorn_iterations: see ``sinkhorn``. Default 3.
        reduction: "mean" (default) or "sum" over samples, or "none": one value per sample.

    Raises:
        ValueError: for a setting out of range, or observations of other widths than the estimator's.
        KeyError: for a batch without the next critic observation.

    Source: Long et al. 2024, "Hybrid Internal Model", arXiv:2312.11460, as published in HIMLoco.

    Examples:
        >>> from edenrl.modules import HIMLayout
        >>> loss = HIMEstimatorLoss(HIMEstimator(HIMLayout(frame=10, frames=6, order="oldest_first")))
        >>> batch = TensorDict(history=torch.randn(8, 60), next=dict(critic=torch.randn(8, 13)), batch_size=[8])
        >>> out = loss(batch)
        >>> (out["loss_swap"] + out["loss_estimation"]).backward()
        >>> loss.estimator.prototypes.grad.shape
        torch.Size([64, 32])
    """

    @dataclass
    class _AcceptedKeys:
        history: NestedKey = "history"
        critic: NestedKey = "critic"

    def __init__(
        self,
        estimator: HIMEstimator,
        *,
        temperature: float = 3.0,
        sinkhorn_eps: float = 0.05,
        sinkhorn_iterations: int = 3,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        require_instance(self, "estimator", estimator, HIMEstimator)
        require(self, "temperature", temperature, temperature > 0, "> 0")
        require(self, "sinkhorn_eps", sinkhorn_eps, sinkhorn_eps > 0, "> 0")
        require(self, "sinkhorn_iterations", sinkhorn_iterations, sinkhorn_iterations >= 1, ">= 1")
        super().__init__(reduction=reduction)
        self.estimator = estimator
        self.temperature, self.sinkhorn_eps, self.sinkhorn_iterations = temperature, sinkhorn_eps, sinkhorn_iterations

    def _make_in_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.history, ("next", self.tensor_keys.critic)]

    def _make_out_keys(self) -> list[NestedKey]:
        metrics = ["velocity_error", "velocity_error_relative", "prototype_entropy", "latent_variance"]
        return ["loss_swap", "loss_estimation", *metrics]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "estimator"."""
        return {"estimator": self._trained(self.estimator)}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the losses and metrics of a batch of any shape."""
        history, critic = self._observations(tensordict)
        velocity, source = self.estimator(history)
        target, true_velocity = self.estimator.target(critic), self.estimator.layout.velocity_of(critic)
        prototypes = self.estimator.unit_prototypes()
        scores = source @ prototypes.T, target @ prototypes.T
        q_source, q_target = (sinkhorn(score, self.sinkhorn_eps, self.sinkhorn_iterations) for score in scores)
        p_source, p_target = ((score / self.temperature).log_softmax(-1) for score in scores)
        swap = -0.5 * (q_source * p_target + q_target * p_source).mean(-1)
        estimation = (velocity - true_velocity).square().mean(-1)
        out = TensorDict(
            {
                "loss_swap": self._reduce_loss(swap.reshape(tensordict.batch_size), tensordict),
                "loss_estimation": self._reduce_loss(estimation.reshape(tensordict.batch_size), tensordict),
            }
        )
        with torch.no_grad():
            error = estimation.mean().sqrt()
            spread = true_velocity.var(0, correction=0).mean().sqrt()
            used = nn.functional.one_hot(scores[0].argmax(-1), scores[0].shape[-1]).to(error.dtype).mean(0)
            out.set("velocity_error", error)
            out.set("velocity_error_relative", error / spread.clamp_min(1e-6))
            out.set("prototype_entropy", -torch.xlogy(used, used).sum())
            out.set("latent_variance", source.var(0, correction=0).sum())
        return out

    def _observations(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """History and next critic observation as ``[samples, width]``."""
        layout, found = self.estimator.layout, []
        for key, width in zip(self.in_keys, (layout.history_width, layout.frame + 3), strict=True):
            value = tensordict.get(key, None)
            if value is None:
                raise KeyError(
                    f"The batch has no {key!r}. Keep it in the rollout, also at the end of episodes, or "
                    "name it with set_keys(history=..., critic=...)."
                )
            if value.shape != (*tensordict.batch_size, width):
                raise ValueError(
                    f"{key!r} has shape {tuple(value.shape)}; the estimator was built for "
                    f"{(*tensordict.batch_size, width)}: {layout.frames} frames of {layout.frame} entries in the "
                    "history, one and the velocity (3) in the critic's observation."
                )
            found.append(value.reshape(-1, width))
        return found[0], found[1]


class HIMLoss(PPOLoss):
    r"""PPO for an actor that holds an estimator, with optional terms that make actor and critic symmetric.

    With ``mirrors``, for observations ``o`` and their mirror image ``M o``:

    - ``loss_actor_symmetry = scale * mean over the batch of sum over actions (mu(M o) - M mu(o))^2``, with gradient
      through both means;
    - ``loss_critic_symmetry = scale * mean (V(M o) - V(o))^2``, with ``V(o)`` held constant.

    and the detached scalar ``equivariance_error``, ``|mu(M o) - M mu(o)|`` over ``sqrt(|mu(M o)|^2 + |mu(o)|^2)``, root
    mean square over the batch: 0 for a symmetric actor, 1 for means that have nothing to do with each other.

    The other differences from the parent: ``parameter_groups()`` leaves out the estimator inside the actor (parameters
    named ``estimator``), which ``HIMEstimatorLoss`` trains.

    Args:
        actor_network: as for ``PPOLoss``; Gaussian when there are mirrors.
        critic_network: as for ``PPOLoss``.
        mirrors: ``SignedPermutation`` by key for everything that actor and critic read, and one under
            ``"action"``; others are ignored. An environment publishes them as ``env.mirrors``. Default: no symmetry.
        symmetry_scale: weight of both terms. Default 1.0.
        kwargs: options of ``PPOLoss``.

    Raises:
        ValueError: a mirror is missing or has another width, the scale is negative, or the policy is not Gaussian.

    Source: Long et al. 2024, "Hybrid Internal Model", arXiv:2312.11460; symmetry as in OpenHomie (arXiv:2502.13013),
    which holds ``M mu(o)`` constant. On data that holds every sample with its mirror image the gradient is the same up
    to a factor of 2.

    Examples:
        >>> from edenrl.modules import HIMLayout, him_actor, value_critic
        >>> actor = him_actor(HIMLayout(frame=2, frames=3, order="oldest_first"), 1, hidden=(8,), target_skip_dim=0)
        >>> critic = value_critic({"critic": 5}, normalize=False)
        >>> mirrors = {
        ...     "history": SignedPermutation(range(6), [1, -1] * 3),
        ...     "critic": SignedPermutation(range(5), [1, -1, 1, -1, 1]),
        ...     "action": SignedPermutation([0], [-1]),
        ... }
        >>> loss = HIMLoss(actor, critic, mirrors=mirrors)
        >>> batch = TensorDict(history=torch.randn(8, 6), critic=torch.randn(8, 5), batch_size=[8])
        >>> batch = critic(actor(batch)).detach()
        >>> batch = batch.update({"advantage": torch.randn(8, 1), "value_target": torch.randn(8, 1)})
        >>> [name for name in loss(batch).keys() if "symmetry" in name]
        ['loss_actor_symmetry', 'loss_critic_symmetry']
    """

    _schedulable_buffers = frozenset({"symmetry_scale"})
    symmetry_scale: Tensor | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule | None = None,
        *,
        mirrors: Mapping[Any, SignedPermutation] | None = None,
        symmetry_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        require(self, "symmetry_scale", symmetry_scale, 0 <= symmetry_scale < math.inf, ">= 0")
        super().__init__(actor_network, critic_network, **kwargs)
        if mirrors is not None:
            require_instance(self, "mirrors", mirrors, Mapping)
        self.mirrors = None if mirrors is None else dict(mirrors)
        self.register_optional_coeff("symmetry_scale", None if mirrors is None else symmetry_scale, needs="mirrors")
        self._loc: Tensor | None = None
        if mirrors is not None:
            read = [*actor_network.in_keys, *(critic_network.in_keys if critic_network is not None else [])]
            missing = [key for key in dict.fromkeys([*read, "action"]) if key not in mirrors]
            if missing:
                raise ValueError(
                    f"HIMLoss needs a mirror for {missing}; mirrors has {sorted(map(str, mirrors)) or 'none'}. Add it, "
                    "or leave mirrors out."
                )
            check_mirror_widths(mirrors, network_widths(actor_network, critic_network))
            if not {self.tensor_keys.loc, self.tensor_keys.scale} <= set(actor_network.out_keys):
                raise ValueError(
                    f"HIMLoss mirrors the mean of a Gaussian policy; this actor writes "
                    f"{actor_network.out_keys}, not 'loc' and 'scale'. Leave mirrors out."
                )

    def _make_out_keys(self) -> list[NestedKey]:
        keys = super()._make_out_keys()
        if self.mirrors is not None:
            keys += ["loss_actor_symmetry", "equivariance_error"]
            keys += ["loss_critic_symmetry"] if self._has_critic else []
        return keys

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by group, "policy" (the estimator left out) and "critic"."""
        actor = self._parameters_of("actor_network")
        estimator = {id(p) for name, p in actor.named_parameters() if "estimator" in name.split(".")}
        groups = super().parameter_groups()
        return groups | {"policy": [p for p in groups["policy"] if id(p) not in estimator]}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of a batch of any shape."""
        try:
            out = super().forward(tensordict)
            return out if self.mirrors is None else self._add_symmetry(out, tensordict)
        finally:
            self._loc = None

    def _log_weight(self, tensordict: TensorDictBase, adv_shape: torch.Size) -> tuple[Tensor, Any, Tensor, Any]:
        outputs = super()._log_weight(tensordict, adv_shape)
        parameters = self._gaussian_parameters(outputs[1])
        # Stored for the symmetry terms, so that the actor runs only once on the observations.
        self._loc = None if parameters is None else parameters[0]
        return outputs

    def _mirrored(self, tensordict: TensorDictBase, keys: list[NestedKey]) -> TensorDictBase:
        assert self.mirrors is not None
        entries = {key: self.mirrors[key].to(tensordict[key].device)(tensordict[key]) for key in keys}
        return TensorDict(entries, tensordict.batch_size)

    def _add_symmetry(self, out: TensorDictBase, tensordict: TensorDictBase) -> TensorDictBase:
        assert self.mirrors is not None and self.symmetry_scale is not None
        with self._with_parameters("actor_network"):
            dist = self.actor_network.get_dist(self._mirrored(tensordict, self.actor_network.in_keys))
        mirrored = self._gaussian_parameters(dist)
        if self._loc is None or mirrored is None:
            raise ValueError(f"HIMLoss mirrors the mean of a Gaussian policy, got {type(dist).__name__}.")
        image = self.mirrors["action"].to(self._loc.device)(self._loc)
        squares = (mirrored[0] - image).square().sum(-1)
        out.set("loss_actor_symmetry", self._reduce_loss(self.symmetry_scale * squares, tensordict))
        with torch.no_grad():
            size = (mirrored[0].square() + image.square()).sum(-1).mean()
            out.set("equivariance_error", (squares.mean() / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt())
        if self._has_critic:
            keys = self.critic_network.in_keys
            with self._with_parameters("critic_network"):
                with torch.no_grad():
                    value = self.critic_network(tensordict.select(*keys)).get(self.tensor_keys.value)
                mirrored_value = self.critic_network(self._mirrored(tensordict, keys)).get(self.tensor_keys.value)
            squares = (mirrored_value - value).square().mean(-1)
            out.set("loss_critic_symmetry", self._reduce_loss(self.symmetry_scale * squares, tensordict))
        return out
