"""Rapid motor adaptation: PPO with privileged observations, and losses of the history encoder and of the estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import RMAActor, RMAComposition, rma_composition
from edenrl.objectives.base import LossMixin, require_policy
from edenrl.objectives.ppo import PPOLoss

__all__ = ["LinearRamp", "RMADaggerLoss", "RMALoss"]


class LinearRamp(nn.Module):
    """A coefficient that moves linearly with a count of updates, which is part of the state.

    ``start + min(max(counter - begin, 0) / length, 1) * (end - start)``

    Args:
        start: value up to update ``begin``. Default 0.
        end: value from update ``begin + length`` on. Default 0.1.
        begin: update at which the coefficient starts to change. Default 2000.
        length: number of updates over which it changes, at least 1. Default 3000.

    Raises:
        ValueError: for a negative number, or a length below 1.

    Examples:
        >>> ramp = LinearRamp(0.0, 0.1, begin=1, length=2)
        >>> values = []
        >>> for _ in range(5):
        ...     values.append(round(float(ramp()), 3))
        ...     ramp.advance()
        >>> values
        [0.0, 0.0, 0.05, 0.1, 0.1]
    """

    counter: Tensor

    def __init__(self, start: float = 0.0, end: float = 0.1, begin: int = 2000, length: int = 3000) -> None:
        super().__init__()
        if min(start, end, begin) < 0 or length < 1:
            raise ValueError(
                f"start={start}, end={end}, begin={begin} and length={length} were given to LinearRamp; expected "
                "numbers of at least 0 and a length of at least 1."
            )
        self.start, self.end, self.begin, self.length = start, end, begin, length
        self.register_buffer("counter", torch.tensor(0))

    def forward(self) -> Tensor:
        """The coefficient now, a scalar."""
        share = ((self.counter - self.begin) / self.length).clamp(0.0, 1.0)
        return self.start + share * (self.end - self.start)

    def advance(self) -> None:
        """Counts one update."""
        self.counter.add_(1)


class RMALoss(PPOLoss):
    r"""PPO on the privileged path of an ``RMAActor``, an estimator loss and a regularized privileged latent.

    Adds to ``PPOLoss``:

    - ``loss_estimator``: mean over batch and entries of ``(estimator(prop) - priv_explicit)^2``. It trains the
      estimator and nothing else; nothing else trains the estimator.
    - ``loss_priv_reg``: ``ramp * mean |z_priv - z_hist|_2``, which pulls the privileged latent towards the history
      latent. No gradient reaches the history encoder; ``RMADaggerLoss`` trains it.

    and the detached scalars ``latent_distance`` (``mean |z_priv - z_hist|_2``) and ``priv_reg_weight`` (the ramp). The
    surrogate reads the true ``priv_explicit``, also when the acting policy has used the estimate. Call
    ``loss.ramp.advance()`` after the PPO updates on a rollout, and again after the DAgger updates on it.

    Args:
        actor_network: a policy of ``rma_policy`` with the privileged latent and the true ``priv_explicit``.
        critic_network: writes ``state_value``; ``None`` trains the policy alone.
        ramp: the weight of ``loss_priv_reg``. Default: ``LinearRamp()``, 0 for 2000 updates, then rising to 0.1 over
            3000 updates.
        kwargs: options of ``PPOLoss``.

    Raises:
        ValueError: for another composition, or what ``PPOLoss`` refuses.

    Source: Kumar et al. 2021, arXiv:2107.04034; Cheng et al. 2023, arXiv:2309.14341 (estimator, regularization).

    Examples:
        >>> from edenrl.modules import rma_policy, value_critic
        >>> widths = dict(prop=6, priv_explicit=3, priv_latent=5, history=60)
        >>> actor, critic = RMAActor(widths, 4), value_critic({"prop": 6, "priv_latent": 5})
        >>> loss = RMALoss(rma_policy(actor), critic)
        >>> data = TensorDict({k: torch.randn(8, w) for k, w in widths.items()}, batch_size=[8])
        >>> data = data.rename_key_("history", "prop_history")
        >>> data = critic(rma_policy(actor, estimated=True)(data)).detach()  # acted on estimates; the truth is kept
        >>> data = data.update({"advantage": torch.randn(8, 1), "value_target": torch.randn(8, 1)})
        >>> sorted(name for name in loss(data).keys() if name.startswith("loss_"))
        ['loss_critic', 'loss_entropy', 'loss_estimator', 'loss_objective', 'loss_priv_reg']
        >>> list(loss.parameter_groups())
        ['policy', 'critic', 'estimator']
    """

    @dataclass
    class _AcceptedKeys(PPOLoss._AcceptedKeys):
        history: NestedKey = "prop_history"

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule | None = None,
        *,
        ramp: LinearRamp | None = None,
        **kwargs: Any,
    ) -> None:
        require_policy(self, "actor_network", actor_network)
        net = rma_composition(actor_network)
        if net.latent != "privileged" or net.estimated:
            raise ValueError(
                f"RMALoss trains the privileged path on the true priv_explicit; its actor_network has latent="
                f"{net.latent!r}, estimated={net.estimated}. Pass rma_policy(actor), whatever policy collects."
            )
        super().__init__(actor_network, critic_network, **kwargs)
        self.ramp = LinearRamp() if ramp is None else ramp
        if net.flat is None and net.keys["history"] != self.tensor_keys.history:
            self.set_keys(history=net.keys["history"])

    def _make_in_keys(self) -> list[NestedKey]:
        net = rma_composition(self.actor_network)
        history = self.tensor_keys.history if net.flat is None else net.flat
        return list(dict.fromkeys([*super()._make_in_keys(), history]))

    def _make_out_keys(self) -> list[NestedKey]:
        own = ["loss_estimator", "loss_priv_reg", "latent_distance", "priv_reg_weight"]
        return [*super()._make_out_keys(), *own]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by group: "policy", "critic" and "estimator".

        "policy" is the encoders of scan and privileged latent, backbone and noise; the history encoder is in no group.
        """
        groups = super().parameter_groups()
        own = {name: self._part(name) for name in ("estimator", "history_encoder")}
        apart = {id(p) for params in own.values() for p in params}
        groups["policy"] = [p for p in groups["policy"] if id(p) not in apart]
        return {**groups, "estimator": [p for p in own["estimator"] if p.requires_grad]}

    def _part(self, part: str) -> list[nn.Parameter]:
        """The parameters of one part of the ``RMAActor``."""
        if not self.functional:
            return list(getattr(rma_composition(self.actor_network).actor, part).parameters())
        path = next(name for name, module in self.actor_network.named_modules() if isinstance(module, RMAActor))
        return list(self.actor_network_params.get((*path.split("."), part)).values(True, True))

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of a batch of any shape."""
        out = super().forward(tensordict)
        with self._with_parameters("actor_network"):
            net = rma_composition(self.actor_network)
            explicit = net.chunk(tensordict, "priv_explicit")
            error = (net.actor.estimator(net.chunk(tensordict, "prop")) - explicit).square().mean(-1)
            z_priv, z_hist = _latents(net, tensordict, net.keys["priv_latent"], self.tensor_keys.history, "privileged")
        distance = torch.linalg.vector_norm(z_priv - z_hist, dim=-1)
        weight = self.ramp().to(distance.dtype)
        out.set("loss_estimator", self._reduce_loss(error, tensordict))
        out.set("loss_priv_reg", self._reduce_loss(weight * distance, tensordict))
        out.set("latent_distance", self._reduce_loss(distance, tensordict, reduction="mean").detach())
        out.set("priv_reg_weight", weight)
        return out


class RMADaggerLoss(LossMixin, LossModule):
    r"""Trains the history encoder of an ``RMAActor`` to give the privileged latent: ``mean |z_priv - z_hist|_2``.

    Use it on rollouts that were collected with the history latent, so that the encoder is trained on the states that it
    visits itself (DAgger, Ross et al. 2011, arXiv:1011.0686). No gradient reaches the privileged encoder.

    Outputs: ``loss_dagger``.

    Args:
        actor_network: a policy of ``rma_policy``, in any composition; it is kept as it is.
        reduction: "mean" (default), "sum" or "none".

    Raises:
        ValueError: for another policy or reduction.

    Source: Kumar et al. 2021, arXiv:2107.04034; Cheng et al. 2023, arXiv:2309.14341.

    Examples:
        >>> from edenrl.modules import rma_policy
        >>> actor = RMAActor(dict(prop=6, priv_explicit=3, priv_latent=5, history=60), 4)
        >>> loss = RMADaggerLoss(rma_policy(actor, latent="history", estimated=True))
        >>> out = loss(TensorDict(priv_latent=torch.randn(8, 5), prop_history=torch.randn(8, 60), batch_size=[8]))
        >>> out["loss_dagger"].backward()
        >>> list(loss.parameter_groups())
        ['history_encoder']
    """

    @dataclass
    class _AcceptedKeys:
        priv_latent: NestedKey = "priv_latent"
        history: NestedKey = "prop_history"

    actor_network: ProbabilisticTensorDictSequential

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        require_policy(self, "actor_network", actor_network)
        net = rma_composition(actor_network)
        super().__init__(reduction=reduction)
        self.actor_network = actor_network
        own = {name: net.keys[name] for name in ("priv_latent", "history")}
        if net.flat is None and own != {name: getattr(self.tensor_keys, name) for name in own}:
            self.set_keys(**own)

    def _make_in_keys(self) -> list[NestedKey]:
        net, names = rma_composition(self.actor_network), self.tensor_keys
        return [names.priv_latent, names.history] if net.flat is None else [net.flat]

    def _make_out_keys(self) -> list[NestedKey]:
        return ["loss_dagger"]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "history_encoder"."""
        encoder = rma_composition(self.actor_network).actor.history_encoder
        return {"history_encoder": self._trained(encoder)}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the loss of a batch of any shape."""
        net, names = rma_composition(self.actor_network), self.tensor_keys
        z_priv, z_hist = _latents(net, tensordict, names.priv_latent, names.history, "history")
        distance = torch.linalg.vector_norm(z_priv - z_hist, dim=-1)
        return TensorDict({"loss_dagger": self._reduce_loss(distance, tensordict)})


def _latents(
    net: RMAComposition, data: TensorDictBase, priv_latent: NestedKey, history: NestedKey, trained: str
) -> tuple[Tensor, Tensor]:
    """The privileged and the history latent; the one that is not ``trained`` is a constant."""
    inputs = net.chunk(data, "priv_latent", priv_latent), net.chunk(data, "history", history)
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained == "privileged"):
        z_priv = net.actor.encode("privileged", priv_latent=inputs[0])
    with torch.set_grad_enabled(torch.is_grad_enabled() and trained == "history"):
        z_hist = net.actor.encode("history", history=inputs[1])
    return z_priv, z_hist
