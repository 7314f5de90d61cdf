"""FlashSAC: soft actor-critic with a distributional critic, batch-normalized over current and next observations."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import FlashActor, FlashCritic
from edenrl.objectives.base import LossMixin, described, require, require_not_negative

__all__ = ["FlashSACLoss", "project_distribution", "squashed_sample"]

_LOG_2PI = math.log(2 * math.pi)


def squashed_sample(loc: Tensor, scale: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """``tanh(loc + scale * noise)`` and its log-density in [-1, 1], summed over the last dimension.

    The density is computed from the noise and not from the action: it stays exact where the tanh saturates.

    Examples:
        >>> action, log_prob = squashed_sample(torch.zeros(2), torch.ones(2), torch.zeros(2))
        >>> action.tolist(), round(float(log_prob), 4)  # 2 * -0.5 * log(2 pi)
        ([0.0, 0.0], -1.8379)
    """
    raw = loc + scale * noise
    gaussian = -0.5 * (noise.square() + _LOG_2PI) - scale.log()
    jacobian = 2 * (math.log(2.0) - raw - F.softplus(-2 * raw))
    return raw.tanh(), (gaussian - jacobian).sum(-1)


def project_distribution(probs: Tensor, values: Tensor, atoms: Tensor) -> Tensor:
    """Moves probabilities from ``values`` onto evenly spaced ``atoms``: each is split between its two neighbours.

    Values beyond the ends count as the ends; mass is conserved.

    Args:
        probs: probabilities ``[*batch, n]``.
        values: where they lie, same shape.
        atoms: the bins ``[m]``, ascending and evenly spaced.

    Returns:
        Probabilities of the bins ``[*batch, m]``.

    Source: Bellemare et al. 2017, arXiv:1707.06887.

    Examples:
        >>> project_distribution(torch.tensor([1.0]), torch.tensor([0.25]), torch.tensor([-1.0, 0.0, 1.0])).tolist()
        [0.0, 0.75, 0.25]
    """
    last = len(atoms) - 1
    place = ((values - atoms[0]) * (last / (atoms[-1] - atoms[0]))).clamp(0, last)
    below = place.floor()
    above_share = (place - below) * probs
    lower = below.nan_to_num().long()  # NaN is no place, and must not become an index
    out = torch.zeros(*values.shape[:-1], last + 1, dtype=probs.dtype, device=probs.device)
    out.scatter_add_(-1, lower, probs - above_share)
    return out.scatter_add_(-1, (lower + 1).clamp_max(last), above_share)


@contextlib.contextmanager
def _held_fixed(module: nn.Module) -> Iterator[None]:
    """A context in which gradient flows through ``module`` to its inputs, but not to its parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class FlashSACLoss(LossMixin, LossModule):
    r"""Losses of FlashSAC on (n-step) transitions; ``actor_loss``, ``temperature_loss``, ``critic_loss`` give one each.

    Actions are in [-1, 1]. Let :math:`\alpha` be the temperature and :math:`Q` the minimum over the critics of the
    ensemble (the members).

    - ``loss_actor``: :math:`\alpha \log\pi(a|s) - Q(s, a)` for a fresh action ``a``. The actor processes observations
      and next observations in one batch and normalizes with the statistics of that batch. The critic is fixed and uses
      its running statistics.
    - ``loss_temperature``: :math:`\alpha (H - \bar H)`.
    - ``loss_critic``: cross-entropy of every member with the projected target
      :math:`r + \gamma^n (1 - terminated)(z - \alpha\log\pi(a'|s'))`. The probabilities of the atoms :math:`z` come
      from the target member with the smaller value at ``(s', a')``. The actor samples ``a'`` with its running
      statistics. The online and the target critic each process both observations in one batch and normalize with the
      statistics of that batch. Terminations end the return, time-outs do not.

    ``forward`` computes all of them from the same parameters. The published algorithm updates the actor and the
    temperature before every second critic update; ``examples/train_flashsac.py`` does the same. Call ``update_target``
    after each critic step. It averages the parameters of the target; the target's batch-norm statistics follow from its
    own forward passes. In ``eval()`` mode all networks use running statistics and do not update them.

    Outputs: ``loss_actor``, ``loss_bc`` (with ``bc_coeff``), ``loss_temperature``, ``loss_critic``, meant to be
    summed; detached scalars ``entropy`` (nats), ``alpha``, ``q_value`` (mean Q of the fresh actions) and
    ``target_value`` (mean of the targets).

    Args:
        actor_network: from ``edenrl.modules.flash_actor``.
        critic_network: from ``edenrl.modules.flash_critic``; its target is a copy.
        gamma: discount per step, in (0, 1]; a transition over n steps (``steps_to_next_obs``) takes its n-th power.
        alpha_init: temperature at the start.
        target_entropy: in nats; default that of a Gaussian with ``target_sigma`` in every action dimension.
        target_sigma: standard deviation that the default target entropy stands for.
        tau: share of the online critic that ``update_target`` mixes in.
        bc_coeff: weight of ``mean |Q| * (a - a_buffer)^2``, which holds the actor to the data; 0 leaves it out.
        reduction: "mean" (default), "sum" or "none".

    Raises:
        ValueError: for a setting out of range, other networks, a reward that is not ``[*batch, 1]``, or (on the CPU)
            entries that are not finite.

    Source: FlashSAC, arXiv:2604.04539. A window that a time-out cuts short is discounted by the steps it really has.

    Examples:
        >>> from torchrl.data import Bounded
        >>> from edenrl.modules import flash_actor, flash_critic
        >>> actor = flash_actor({"observation": 3}, Bounded(-1, 1, (2,)), hidden_dim=8)
        >>> loss = FlashSACLoss(actor, flash_critic({"observation": 3}, 2, hidden_dim=8))
        >>> ends = dict(reward=torch.zeros(8, 1), terminated=torch.zeros(8, 1, dtype=torch.bool))
        >>> data = dict(observation=torch.randn(8, 3), action=torch.zeros(8, 2))
        >>> batch = TensorDict(data | {"next": ends | dict(observation=torch.randn(8, 3))}, batch_size=[8])
        >>> sorted(loss(batch).keys())
        ['alpha', 'entropy', 'loss_actor', 'loss_critic', 'loss_temperature', 'q_value', 'target_value']
        >>> loss.critic_loss(batch)["loss_critic"].backward()
        >>> loss.update_target()
    """

    @dataclass
    class _AcceptedKeys:
        action: NestedKey = "action"
        reward: NestedKey = "reward"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"

    _schedulable_buffers = frozenset({"bc_coeff"})

    actor_network: ProbabilisticTensorDictSequential
    critic_network: TensorDictModule
    target_critic: TensorDictModule
    bc_coeff: Tensor | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic_network: TensorDictModule,
        *,
        gamma: float = 0.99,
        alpha_init: float = 0.01,
        target_entropy: float | None = None,
        target_sigma: float = 0.15,
        tau: float = 0.01,
        bc_coeff: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        require(self, "gamma", gamma, 0 < gamma <= 1, "in (0, 1]")
        require(self, "alpha_init", alpha_init, alpha_init > 0, "> 0")
        require(self, "target_sigma", target_sigma, target_sigma > 0, "> 0")
        require(self, "tau", tau, 0 < tau <= 1, "in (0, 1]")
        require_not_negative(self, bc_coeff=bc_coeff)
        parts = getattr(actor_network, "module", None) if hasattr(actor_network, "get_dist") else None
        actor = None if parts is None else getattr(parts[0], "module", None)
        if not isinstance(actor, FlashActor):
            raise ValueError(
                f"FlashSACLoss needs actor_network to be an actor from flash_actor, got {described(actor_network)}."
            )
        if not isinstance(getattr(critic_network, "module", None), FlashCritic):
            raise ValueError(
                f"FlashSACLoss needs critic_network to be a critic from flash_critic, got {described(critic_network)}."
            )
        super().__init__(reduction=reduction)
        self.actor_network, self.critic_network = actor_network, critic_network
        self.target_critic = copy.deepcopy(critic_network).requires_grad_(False)
        num_actions = len(actor.mean_bias)
        self.target_entropy = (
            0.5 * num_actions * (_LOG_2PI + 1 + 2 * math.log(target_sigma))
            if target_entropy is None
            else float(target_entropy)
        )
        self.log_alpha = nn.Parameter(torch.tensor(math.log(alpha_init)))
        self.register_optional_coeff("bc_coeff", bc_coeff or None)
        self.gamma, self.tau = gamma, tau

    def _make_in_keys(self) -> list[NestedKey]:
        names = self.tensor_keys
        groups = [*self.actor_network.in_keys, *self._critic_groups]
        ends = [unravel_key(("next", key)) for key in (*groups, names.reward, names.terminated)]
        return list(dict.fromkeys([*groups, names.action, *ends, names.steps_to_next_obs]))

    def _make_out_keys(self) -> list[NestedKey]:
        losses = ["loss_actor", "loss_temperature", "loss_critic"]
        if self.bc_coeff is not None:
            losses.append("loss_bc")
        return [*losses, "entropy", "alpha", "q_value", "target_value"]

    def _finite_keys(self) -> list[NestedKey]:
        return []  # actor_loss and critic_loss look themselves, because they are called alone as well

    @property
    def _critic_groups(self) -> list[NestedKey]:
        return list(self.critic_network.in_keys[:-1])  # the last one is the action

    @property
    def observation_keys(self) -> list[NestedKey]:
        """The observations that actor and critic read: what a replay buffer has to hold."""
        return list(dict.fromkeys([*self.actor_network.in_keys, *self._critic_groups]))

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by group: "policy", "temperature" and "critic"."""
        return {
            "policy": self._trained(self.actor_network),
            "temperature": [self.log_alpha],
            "critic": self._trained(self.critic_network),
        }

    @property
    def alpha(self) -> Tensor:
        """The temperature, without gradient."""
        return self.log_alpha.detach().exp()

    @torch.no_grad()
    def update_target(self) -> None:
        """Moves the target's parameters towards the online critic's by ``tau``.

        They are not projected, as in the published code: rows of the target are averages of unit vectors and lie up to
        a few percent inside the sphere.
        """
        target, online = (list(net.parameters()) for net in (self.target_critic, self.critic_network))
        torch._foreach_lerp_(target, online, self.tau)

    def compile_networks(self) -> None:
        """Runs the trunks of actor, critic and target through ``torch.compile``, in place."""
        for network in (self._actor, self._critic, self._target):
            network.trunk.compile()

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes all losses and metrics of a batch of any shape from the same parameters."""
        actor = self.actor_loss(tensordict)
        temperature = self.temperature_loss(tensordict, actor.pop("log_prob"))
        return actor.update(temperature).update(self.critic_loss(tensordict))

    def actor_loss(self, tensordict: TensorDictBase) -> TensorDict:
        """``loss_actor`` and ``loss_bc``; the entry ``log_prob`` ``[*batch]`` is for ``temperature_loss``."""
        self._refuse_nonfinite(tensordict, self.in_keys)  # before the pass moves the batch statistics
        size, batch = tensordict.numel(), tensordict.batch_size
        both = self._both_ends(tensordict, self.actor_network.in_keys)
        loc, scale = self._actor(*both, batch_stats=self.training)
        action, log_prob = (out[:size] for out in squashed_sample(loc, scale, self._noise(loc)))
        with _held_fixed(self.critic_network):
            values, _ = self._critic(*self._rows(tensordict, self._critic_groups), action)
        value = values.amin(-1)
        out = {"loss_actor": self._reduced(self.alpha * log_prob - value, tensordict)}
        if self.bc_coeff is not None:
            error = (action - self._rows(tensordict, [self.tensor_keys.action])[0]).square().mean(-1)
            out["loss_bc"] = self._reduced(self.bc_coeff * value.detach().abs().mean() * error, tensordict)
        out |= {"entropy": -log_prob.detach().mean(), "q_value": value.detach().mean()}
        return TensorDict({**out, "log_prob": log_prob.detach().view(batch)})

    def temperature_loss(self, tensordict: TensorDictBase, log_prob: Tensor) -> TensorDict:
        """``loss_temperature`` from the log-probabilities that ``actor_loss`` returned."""
        excess = -log_prob.reshape(-1) - self.target_entropy
        return TensorDict(
            {"loss_temperature": self._reduced(self.log_alpha.exp() * excess, tensordict), "alpha": self.alpha}
        )

    def critic_loss(self, tensordict: TensorDictBase) -> TensorDict:
        """``loss_critic``."""
        self._refuse_nonfinite(tensordict, self.in_keys)
        size, names = tensordict.numel(), self.tensor_keys
        reward, terminated = (
            self._column(tensordict, unravel_key(("next", key))) for key in (names.reward, names.terminated)
        )
        steps = tensordict.get(names.steps_to_next_obs, None)
        gamma = self.gamma if steps is None else self.gamma ** steps.reshape(-1, 1)
        with torch.no_grad():
            ends = [unravel_key(("next", key)) for key in self.actor_network.in_keys]
            loc, scale = self._actor(*self._rows(tensordict, ends))
            next_action, next_log_prob = squashed_sample(loc, scale, self._noise(loc))
            action = self._rows(tensordict, [names.action])[0]
            inputs = [*self._both_ends(tensordict, self._critic_groups), torch.cat([action, next_action])]
            # Logits [rows, members, bins] at the next observations, which are the second half of the batch.
            next_logits = self._target.logits(*inputs, batch_stats=self.training, rows=slice(size, None))
            next_log_probs = next_logits.log_softmax(-1)
            smaller = self._target.value(next_log_probs).argmin(-1)  # the member with the smaller value, per row
            probs = next_log_probs[torch.arange(size, device=smaller.device), smaller].exp()
            returns = self._critic.atoms - self.alpha * next_log_prob.unsqueeze(-1)
            targets = torch.where(terminated.bool(), reward, reward + gamma * returns)
            target = project_distribution(probs, targets, self._critic.atoms)
        log_probs = self._critic.logits(*inputs, batch_stats=self.training, rows=slice(size)).log_softmax(-1)
        loss = -(target.unsqueeze(1) * log_probs).sum(-1).mean(-1)
        return TensorDict(
            {
                "loss_critic": self._reduced(loss, tensordict),
                "target_value": (target * self._critic.atoms).sum(-1).mean(),
            }
        )

    @property
    def _actor(self) -> FlashActor:
        actor: FlashActor = self.actor_network.module[0].module
        return actor

    @property
    def _critic(self) -> FlashCritic:
        critic: FlashCritic = self.critic_network.module
        return critic

    @property
    def _target(self) -> FlashCritic:
        critic: FlashCritic = self.target_critic.module
        return critic

    @staticmethod
    def _noise(like: Tensor) -> Tensor:
        return torch.randn_like(like)

    @staticmethod
    def _rows(tensordict: TensorDictBase, keys: list[NestedKey]) -> list[Tensor]:
        """Entries ``[*batch, d]`` as ``[rows, d]``."""
        dims = tensordict.batch_dims
        return [tensordict.get(key).flatten(0, dims - 1) if dims else tensordict.get(key).unsqueeze(0) for key in keys]

    def _both_ends(self, tensordict: TensorDictBase, keys: list[NestedKey]) -> list[Tensor]:
        now = self._rows(tensordict, keys)
        later = self._rows(tensordict, [unravel_key(("next", key)) for key in keys])
        return [torch.cat(pair) for pair in zip(now, later, strict=True)]

    @staticmethod
    def _column(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
        value = tensordict.get(key)
        if value.shape != (*tensordict.batch_size, 1):
            raise ValueError(
                f"FlashSACLoss needs {key!r} of shape {(*tensordict.batch_size, 1)}, got {tuple(value.shape)}; add the "
                "trailing dimension with unsqueeze(-1)."
            )
        return value.reshape(-1, 1)

    def _reduced(self, rows: Tensor, tensordict: TensorDictBase) -> Tensor:
        return self._reduce_loss(rows.view(tensordict.batch_size), tensordict)
