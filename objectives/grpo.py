"""Group relative policy optimization: no critic, the other members of a group are the baseline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase, dispatch
from torch import Tensor, nn

from edenrl.modules.finite import LARGEST
from edenrl.objectives.base import require_not_negative, require_policy
from edenrl.objectives.ppo import PPOLoss

__all__ = ["GRPOLoss", "GroupRelativeAdvantage"]

# A standard deviation counts as zero below this many float epsilons, times the return of the absolute rewards.
_ROUNDING_UNITS = 32


class GroupRelativeAdvantage(TensorDictModuleBase):
    r"""Advantage of a step over the same step of the other members of its group.

    Rows ``0 .. group_size - 1`` of a rollout are the first group, and so on; the members of a group must have started
    in the same state (``edenrl.envs.set_group_size``). With ``G_t = r_t + gamma G_{t+1} (1 - done_t)``, zero beyond the
    last step, the advantage is ``(G - mean) / (std + eps)``, mean and population standard deviation taken over the
    members that count at that step. There is no critic to estimate what would have followed: a time-out ends the return
    like a termination, and so does the end of the rollout.

    A step counts (``group_mask``) up to and including the first ``done`` of its row, after which a row has left the
    state it shared with its group; with ``truncate_at_first_done=False`` every step counts. The advantage is 0 for
    steps that do not count, and for a member that is the only one at its step. It is also exactly 0 if the returns of a
    group differ only by rounding errors, because dividing by a tiny standard deviation would turn these into advantages
    near 1.

    A NaN reward is treated as missing, for example when the simulation of one row has failed. Steps whose return
    contains it do not count; the other members are compared without them. ``metrics`` counts NaN rewards. Therefore no
    NaN reaches the loss. A reward that is infinite or beyond 1e18, or a rollout in which no step is left,
    is refused.

    Input: a rollout ``[N, T]`` from one collection with ``("next", "reward")`` and ``("next", "done")``, each
    ``[N, T, 1]``. Writes ``advantage``, ``group_return`` (``G``; zero where it is unknown) and ``group_mask`` (bool),
    each ``[N, T, 1]``.

    Args:
        gamma: discount in [0, 1].
        group_size: members of a group, at least 2. Default 4.
        eps: added to the standard deviation. Default 1e-8.
        truncate_at_first_done: count only the first episode of each row. Default True.
        reward_key: reward, under "next". Default "reward".
        done_key: end of an episode, under "next". Default "done".
        advantage_key: where the advantage is written. Default "advantage".
        mask_key: where the mask is written. Default "group_mask".

    Raises:
        ValueError: for ``group_size`` below 2, a batch that is not ``[N, T]`` with N a multiple of ``group_size``,
            a reward that is infinite or beyond 1e18 (naming row and step), or a rollout without any step that counts.

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300; per-step returns and the mask as in EmbodiChain.

    Examples:
        >>> from tensordict import TensorDict
        >>> reward = torch.tensor([0.0, 0.0, 0.0, 4.0]).reshape(4, 1, 1)
        >>> rollout = TensorDict(next=dict(reward=reward, done=torch.ones_like(reward).bool()), batch_size=[4, 1])
        >>> GroupRelativeAdvantage(gamma=0.99, group_size=4)(rollout)["advantage"].flatten()
        tensor([-0.5774, -0.5774, -0.5774,  1.7321])
    """

    def __init__(
        self,
        *,
        gamma: float,
        group_size: int = 4,
        eps: float = 1e-8,
        truncate_at_first_done: bool = True,
        reward_key: NestedKey = "reward",
        done_key: NestedKey = "done",
        advantage_key: NestedKey = "advantage",
        mask_key: NestedKey = "group_mask",
    ) -> None:
        super().__init__()
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"GroupRelativeAdvantage needs gamma in [0, 1], got {gamma}.")
        if group_size < 2:
            raise ValueError(f"GroupRelativeAdvantage needs group_size >= 2, got {group_size}: one is no comparison.")
        if eps < 0:
            raise ValueError(f"GroupRelativeAdvantage needs eps >= 0, got {eps}.")
        self.gamma, self.group_size, self.eps = gamma, group_size, eps
        self.truncate_at_first_done = truncate_at_first_done
        self.in_keys = [_next(reward_key), _next(done_key)]
        self.out_keys = [advantage_key, "group_return", mask_key]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes advantages, returns and mask into the rollout and returns it."""
        self._check_shape(tensordict)
        reward, done = (tensordict.get(key).squeeze(-1) for key in self.in_keys)
        returns, size = self._returns(reward, done)
        known = ~returns.isnan()
        ended = done.cumsum(1) > done.long()  # whether the row was done at an earlier step
        counts = known & ~ended if self.truncate_at_first_done else known
        self._refuse_useless(reward, counts)
        returns = returns.where(known, 0.0)
        advantage = self._advantage(returns, counts, size.where(counts, 0.0))
        for key, value in zip(self.out_keys, (advantage, returns, counts), strict=True):
            tensordict.set(key, value.unsqueeze(-1))
        return tensordict

    @torch.no_grad()
    def metrics(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """Scalars about a rollout that has been through ``forward``.

        Returns:
            ``group/return``, the mean (discounted) return of the rows from their first step; ``group/zero_spread``, the
            fraction of (group, step) pairs in which every advantage is zero, so that nothing is learned, among the
            pairs with at least one member that counts; ``group/counted``, the share of steps that count;
            ``group/nan_rewards``.
        """
        advantage, returns, counts = (tensordict.get(key).squeeze(-1) for key in self.out_keys)
        shape = (-1, self.group_size, advantage.shape[-1])
        present = counts.reshape(shape).any(1)
        silent = (advantage.reshape(shape) == 0).all(1) & present
        first = counts[:, 0]
        return {
            "group/return": (returns[:, 0] * first).sum() / first.sum(),
            "group/zero_spread": silent.sum() / present.sum(),
            "group/counted": counts.to(advantage.dtype).mean(),
            "group/nan_rewards": tensordict.get(self.in_keys[0]).isnan().sum(),
        }

    def _returns(self, reward: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        """Discounted returns, and the same of the rewards' magnitudes: the scale of their rounding errors."""
        pair = torch.stack([reward, reward.abs()])
        steps, following = [], torch.zeros_like(pair[..., 0])
        for t in reversed(range(reward.shape[1])):
            # torch.where instead of a product: the next episode may start with a NaN, and NaN * 0 is NaN.
            following = pair[..., t] + self.gamma * torch.where(done[:, t], 0.0, following)
            steps.append(following)
        returns, size = torch.stack(steps[::-1], -1)
        return returns, size

    def _advantage(self, returns: Tensor, counts: Tensor, size: Tensor) -> Tensor:
        shape = (-1, self.group_size, returns.shape[1])
        g, mask = returns.reshape(shape), counts.reshape(shape)
        members = mask.sum(1, keepdim=True).clamp_min(1)
        deviation = (g - (g * mask).sum(1, keepdim=True) / members) * mask
        std = (deviation.square().sum(1, keepdim=True) / members).sqrt()
        rounding = _ROUNDING_UNITS * torch.finfo(g.dtype).eps * size.reshape(shape).amax(1, keepdim=True)
        return torch.where(std > rounding, deviation / (std + self.eps), 0.0).reshape(returns.shape)

    def _check_shape(self, tensordict: TensorDictBase) -> None:
        shape = tuple(tensordict.batch_size)
        if len(shape) != 2 or shape[0] % self.group_size:
            raise ValueError(
                f"GroupRelativeAdvantage needs a rollout [N, T] with N a multiple of group_size = {self.group_size}, "
                f"got the batch {shape}. Give it the rollout as collected, before it is flattened into mini-batches."
            )
        for key in self.in_keys:
            entry = tensordict.get(key, None)
            if entry is None or entry.shape != (*shape, 1):
                given = "nothing" if entry is None else tuple(entry.shape)
                raise ValueError(f"GroupRelativeAdvantage needs {key!r} of shape {(*shape, 1)}, got {given}.")

    def _refuse_useless(self, reward: Tensor, counts: Tensor) -> None:
        # Squares of larger rewards overflow, and all advantages of the group would be 0.
        huge = reward.abs() >= LARGEST  # false for NaN
        # If nothing is wrong, only one boolean is copied to the CPU.
        if not bool(huge.any() | ~counts.any()):
            return
        if not bool(huge.any()):
            raise ValueError(
                f"Every return in the rollout {tuple(reward.shape)} contains a NaN reward ({int(reward.isnan().sum())} "
                "of them): nothing is left to learn from. Fix the environment."
            )
        env, step = huge.nonzero()[0].tolist()
        raise ValueError(
            f"{self.in_keys[0]!r} holds {reward[env, step].item()} at env {env}, step {step}: the rollout is refused "
            "before anything is trained on it. Terminate a state that diverges, or report a reward that could not be "
            "computed as NaN, which is left out."
        )


def _next(key: NestedKey) -> NestedKey:
    return ("next", *key) if isinstance(key, tuple) else ("next", key)


def _frozen_copy(module: nn.Module) -> nn.Module:
    """A copy whose parameters are buffers: saved and moved with the owner, invisible to its optimizers."""
    frozen = copy.deepcopy(module)
    for part in frozen.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return frozen


def _require_reference(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    if getattr(module, "reference", None) is not None and not any(
        key.startswith(f"{prefix}reference.") for key in state
    ):
        raise ValueError(
            "The state has no reference policy (no entry 'reference.*'), which kl_coeff > 0 needs. The current policy "
            "cannot replace it, because the penalty would then pull towards another policy. Load a state that was "
            "saved with kl_coeff > 0, or build the GRPOLoss with kl_coeff=0."
        )


class GRPOLoss(PPOLoss):
    r"""PPO's clipped surrogate on group-relative advantages, without a critic, held to a reference policy.

    Differences from ``PPOLoss``: no critic; steps outside of ``group_mask`` (optional, as ``GroupRelativeAdvantage``
    writes it) count neither in the losses nor in the metrics; and the penalty ``loss_kl = kl_coeff * mean(exp(d) - d -
    1)`` with ``d = log pi_ref(a) - log pi(a)`` (Schulman's k3 estimate of KL(pi || pi_ref)). The gradient runs through
    ``log pi`` only.

    The reference policy is a frozen copy of the policy at construction. It lives in buffers, so it is part of
    ``state_dict`` and of no optimizer; ``loss.reference`` is the module. If you checkpoint the policy without the loss,
    checkpoint it, too.

    Outputs: ``loss_objective``, ``loss_entropy``, ``loss_kl`` (when ``kl_coeff`` is positive) and ``loss_action_bound``
    (when its coefficient is), weighted and meant to be summed; the other entries are detached scalars: ``kl``
    (KL(old || new), see ``PPOLoss``), ``kl_reference`` (the penalty before its coefficient), ``entropy`` and so on.

    Args:
        actor_network: probabilistic actor. If it is Gaussian, the data must hold its ``loc`` and ``scale`` from
            collection.
        clip_epsilon: clip range of the probability ratio, in (0, 1), or a pair (low, high). Default 0.2.
        entropy_coeff: weight of the entropy bonus. Default 0.
        kl_coeff: weight of the penalty; 0 leaves it and the reference policy out. Default 0.02.
        action_bound_coeff: see ``PPOLoss``. Default 0.
        reduction: "mean" (default, over the steps that count), "sum" or "none".
        functional: see TorchRL's losses. Default True.

    Raises:
        ValueError: for a negative coefficient, a clip range outside (0, 1), an advantage that is not ``[*batch, 1]``,
            or, with ``kl_coeff > 0``, a loaded state without the reference policy.
        KeyError: for a batch without "advantage".

    Source: Shao et al. 2024 (DeepSeekMath), arXiv:2402.03300; defaults as in EmbodiChain.

    Examples:
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import gaussian_actor
        >>> actor = gaussian_actor({"observation": 3}, 2)
        >>> loss = GRPOLoss(actor)
        >>> data = actor(TensorDict(observation=torch.randn(8, 3), batch_size=[8])).detach()
        >>> out = loss(data.set("advantage", torch.randn(8, 1)))
        >>> float(out["loss_kl"])
        0.0
        >>> sum(value for name, value in out.items() if name.startswith("loss_")).backward()
    """

    @dataclass
    class _AcceptedKeys(PPOLoss._AcceptedKeys):
        mask: NestedKey = "group_mask"

    _schedulable_buffers = frozenset({"kl_coeff"})

    reference: ProbabilisticTensorDictSequential | None

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        entropy_coeff: float = 0.0,
        kl_coeff: float = 0.02,
        action_bound_coeff: float = 0.0,
        reduction: str = "mean",
        functional: bool = True,
    ) -> None:
        require_policy(self, "actor_network", actor_network)
        require_not_negative(self, kl_coeff=kl_coeff)
        # First, because a functional loss takes the parameters out of the network.
        reference = _frozen_copy(actor_network) if kl_coeff else None
        super().__init__(
            actor_network,
            clip_epsilon=clip_epsilon,
            entropy_coeff=entropy_coeff,
            action_bound_coeff=action_bound_coeff,
            clip_value=False,
            reduction=reduction,
            functional=functional,
        )
        self.reference = reference
        self.register_optional_coeff("kl_coeff", kl_coeff or None)
        self.register_load_state_dict_pre_hook(_require_reference)
        self._kept: dict[str, Any] = {}

    def _make_in_keys(self) -> list[NestedKey]:
        return [*super()._make_in_keys(), self.tensor_keys.mask]

    def _make_out_keys(self) -> list[NestedKey]:
        penalty = [] if self.reference is None else ["loss_kl", "kl_reference"]
        return [*super()._make_out_keys(), *penalty]

    def _loss_mask_keys(self) -> tuple[NestedKey, ...]:
        return (self.tensor_keys.mask, *super()._loss_mask_keys())

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the weighted losses and metrics of a batch of any shape."""
        if self.tensor_keys.advantage not in tensordict.keys(include_nested=True):
            raise KeyError(
                f"The batch has no {self.tensor_keys.advantage!r}. Run GroupRelativeAdvantage on the rollout [N, T] "
                "before it is split into mini-batches, or rename the entry with set_keys(advantage=...)."
            )
        try:
            out = super().forward(tensordict)
            kept = self._kept
        finally:
            self._kept = {}
        mean = partial(self._reduce_loss, tensordict=tensordict, reduction="mean")
        with torch.no_grad():
            # The parent's metrics are taken over every step.
            log_weight, (low, high) = kept["log_weight"], self._clip_bounds
            ratio = log_weight.exp()
            out.set("clip_fraction", mean(((log_weight < low) | (log_weight > high)).to(ratio.dtype)))
            out.set("mean_ratio", mean(ratio))
            out.set("max_ratio", self._reduce_loss(ratio, tensordict, reduction="none").max())
            out.set("ESS", mean(ratio).square() / mean(ratio.square()).clamp_min(torch.finfo(ratio.dtype).tiny))
            out.set("entropy", mean(kept["entropy"]))
        if self.reference is not None:
            penalty = self._penalty(tensordict, kept["log_prob"], self.reference)
            out.set("kl_reference", mean(penalty.detach()))
            out.set("loss_kl", self._reduce_loss(self.kl_coeff * penalty, tensordict))
        return out

    def _penalty(self, tensordict: TensorDictBase, log_prob: Any, policy: ProbabilisticTensorDictSequential) -> Tensor:
        if not isinstance(log_prob, Tensor):
            raise ValueError("kl_coeff > 0 needs a policy with one log-probability per step; set kl_coeff=0.")
        with torch.no_grad():
            reference = self._action_log_prob(policy.get_dist(tensordict), tensordict)
        # Masked before the exponential: an overflow outside of the mask would still poison the gradient.
        difference = self._reduce_loss(reference - log_prob, tensordict, reduction="none")
        return difference.exp() - difference - 1

    # The next three methods store what the parent computes, so that the actor runs only once.
    def _get_cur_log_prob(self, tensordict: TensorDictBase, params: Any = None) -> tuple[Any, Any, bool]:
        outputs = super()._get_cur_log_prob(tensordict, params)
        self._kept["log_prob"] = outputs[0]
        return outputs

    def _get_entropy(self, dist: Any, adv_shape: torch.Size) -> Any:
        entropy = super()._get_entropy(dist, adv_shape)
        self._kept["entropy"] = entropy.detach().squeeze(-1)
        return entropy

    def _log_weight(self, tensordict: TensorDictBase, adv_shape: torch.Size) -> tuple[Tensor, Any, Tensor, Any]:
        log_weight, dist, kl_approx, correction = super()._log_weight(tensordict, adv_shape)
        log_weight = self._reduce_loss(log_weight, tensordict, reduction="none")
        kl_approx = self._reduce_loss(kl_approx.detach(), tensordict, reduction="mean")
        self._kept["log_weight"] = log_weight.detach().squeeze(-1)
        return log_weight, dist, kl_approx, correction
