"""A loss that penalizes asymmetric policies: mirrored observations should give mirrored actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import SignedPermutation, check_mirror_widths, network_widths
from edenrl.objectives.base import LossMixin, require_instance, require_not_negative, require_policy

__all__ = ["MirrorLoss"]


class MirrorLoss(LossMixin, LossModule):
    r"""Mean squared difference between the action of the mirrored observation and the mirrored action.

    ``loss_symmetry = symmetry_coeff * mean (mu(M o) - M mu(o))^2`` over batch and action components: ``o`` is the
    observation, ``M`` mirrors, and ``mu`` is the mean action of a Gaussian policy. Both terms carry gradient. The
    detached scalar ``symmetry_error`` is the loss before its coefficient.

    Add the output to that of the loss that trains the actor, and step on the sum:
    ``step(loss(batch).update(mirror(batch)))``.

    Args:
        actor_network: the policy; its distribution must have a ``loc`` (before any tanh). The loss keeps it as it is
            (no functional copy).
        mirrors: a ``SignedPermutation`` for every entry that the policy reads and one for ``action_key``. Environments
            publish theirs as ``env.mirrors``.
        symmetry_coeff: weight, at least 0. Default 1.
        action_key: name of the action in ``mirrors``. Default "action".
        reduction: "mean" (default) or "sum" over the batch, or "none": one value per sample, ``[*batch]``.

    Raises:
        ValueError: a mirror that is missing or has another width, a policy without ``loc``, a negative weight or an
            unknown reduction.

    Source: Yu et al. 2018, "Learning Symmetric and Low-Energy Locomotion", arXiv:1801.08093.

    Examples:
        >>> from edenrl.modules import gaussian_actor
        >>> mirrors = {"observation": SignedPermutation([1, 0]), "action": SignedPermutation([0], [-1])}
        >>> loss = MirrorLoss(gaussian_actor({"observation": 2}, 1), mirrors)
        >>> out = loss(TensorDict(observation=torch.randn(8, 2), batch_size=[8]))
        >>> out["loss_symmetry"].backward()
        >>> sorted(out.keys())
        ['loss_symmetry', 'symmetry_error']
    """

    @dataclass
    class _AcceptedKeys:
        loc: NestedKey = "loc"

    _schedulable_buffers = frozenset({"symmetry_coeff"})
    actor_network: ProbabilisticTensorDictSequential
    symmetry_coeff: Tensor

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        mirrors: Mapping[str, SignedPermutation],
        *,
        symmetry_coeff: float = 1.0,
        action_key: str = "action",
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        require_policy(self, "actor_network", actor_network)
        require_instance(self, "mirrors", mirrors, Mapping)
        require_not_negative(self, symmetry_coeff=symmetry_coeff)
        read = list(actor_network.in_keys)
        if missing := [key for key in (*read, action_key) if key not in mirrors]:
            raise ValueError(
                f"MirrorLoss needs a mirror for {missing}; given are {sorted(mirrors) or 'none'}. Read other groups, "
                "or leave the loss out."
            )
        check_mirror_widths(mirrors, network_widths(actor_network, action_key=action_key))
        if "loc" not in actor_network.out_keys:
            raise ValueError(
                f"MirrorLoss needs a policy that writes 'loc', such as gaussian_actor's; this one writes "
                f"{list(actor_network.out_keys)}."
            )
        super().__init__(reduction=reduction)
        self.actor_network = actor_network
        self.register_coeff_buffer("symmetry_coeff", float(symmetry_coeff))
        # In a dict and a tuple, so that torch does not register them: they belong to the task, not to the state_dict.
        self._mirrors = {key: mirrors[key] for key in read}
        self._action_mirror = (mirrors[action_key],)

    def _make_in_keys(self) -> list[NestedKey]:
        return list(self.actor_network.in_keys)

    def _make_out_keys(self) -> list[NestedKey]:
        return ["loss_symmetry", "symmetry_error"]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "policy", of those that the mean depends on."""
        parameters = self._trained(self.actor_network)
        like = next(self.actor_network.parameters())
        # Found by autograd: the mean does not depend on the noise, and in some policies not on whole sub-networks.
        widths = {key: len(mirror.index) for key, mirror in self._mirrors.items()}
        probe = TensorDict({key: like.new_zeros(1, width) for key, width in widths.items()}, batch_size=[1])
        with torch.enable_grad():
            mean = self.actor_network.get_dist_params(probe).get(self.tensor_keys.loc)
        reached = torch.autograd.grad(mean.sum(), parameters, allow_unused=True)
        return {"policy": [p for p, gradient in zip(parameters, reached, strict=True) if gradient is not None]}

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Computes the loss of a batch of any shape."""
        observation = tensordict.select(*self.actor_network.in_keys)
        mirrored = observation.copy()
        device = self.symmetry_coeff.device
        for key, mirror in self._mirrors.items():
            mirrored.set(key, mirror.to(device)(observation.get(key)))
        # One pass over both: networks cost less in large batches.
        both = self.actor_network.get_dist_params(torch.stack([observation, mirrored])).get(self.tensor_keys.loc)
        (action_mirror,) = self._action_mirror
        error = (both[1] - action_mirror.to(device)(both[0])).square().mean(-1)
        return TensorDict(
            {
                "loss_symmetry": self._reduce_loss(self.symmetry_coeff * error, tensordict),
                "symmetry_error": self._reduce_loss(error, tensordict, reduction="mean").detach(),
            }
        )
