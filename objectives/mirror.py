"""A penalty on policies that do not act in mirror images as they do in the originals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torchrl.objectives import LossModule

from edenrl.modules import SignedPermutation

__all__ = ["MirrorLoss"]


class MirrorLoss(LossModule):
    r"""Mean squared difference between the action of the mirrored observation and the mirrored action.

    ``loss_symmetry = symmetry_coeff * mean((mu(M o) - M mu(o))^2)`` over batch and action components, with the mean
    action ``mu`` of any Gaussian actor. Both sides carry gradient. Add its entries to those of the loss that trains the
    actor, and step on the sum: ``step(loss(batch).update(mirror(batch)))``.

    Args:
        actor_network: the policy; its distribution must have a ``loc`` (before any tanh). It is kept as it is.
        mirrors: a ``SignedPermutation`` for everything that the policy reads and for ``action_key``, as an environment
            publishes them in ``env.mirrors``.
        symmetry_coeff: weight. Default 1.
        action_key: the action's name in ``mirrors``. Default "action".
        reduction: "mean" (default), "sum" over the batch, or "none".

    Raises:
        ValueError: a missing mirror, a policy without ``loc``, a negative weight or an unknown reduction.

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

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    rollout_kind: ClassVar[str] = "standard"
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
        if symmetry_coeff < 0 or reduction not in ("mean", "sum", "none"):
            raise ValueError(
                "MirrorLoss needs symmetry_coeff >= 0 and reduction 'mean', 'sum' or 'none', got "
                f"{symmetry_coeff} and {reduction!r}."
            )
        read = list(actor_network.in_keys)
        if missing := [key for key in (*read, action_key) if key not in mirrors]:
            raise ValueError(
                f"MirrorLoss needs a mirror for {missing}; given are {sorted(mirrors) or 'none'}. Read other groups, "
                "or leave the loss out."
            )
        if "loc" not in actor_network.out_keys:
            raise ValueError(
                f"MirrorLoss needs a policy that writes 'loc', such as gaussian_actor's; this one writes "
                f"{list(actor_network.out_keys)}."
            )
        super().__init__()
        self.actor_network = actor_network
        self.reduction = reduction
        self.register_buffer("symmetry_coeff", torch.tensor(float(symmetry_coeff)))
        # Not registered: they describe the task and are no state to be restored.
        self._mirrors = [mirrors[key] for key in (*read, action_key)]
        self._in_keys: list[NestedKey] = read
        self._out_keys: list[NestedKey] = ["loss_symmetry", "symmetry_error"]

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` reads."""
        return self._in_keys

    @in_keys.setter
    def in_keys(self, values: list[NestedKey]) -> None:
        self._in_keys = values

    @property
    def out_keys(self) -> list[NestedKey]:
        """The entries that ``forward`` returns."""
        return self._out_keys

    @out_keys.setter
    def out_keys(self, values: list[NestedKey]) -> None:
        self._out_keys = values

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """Nothing to forward: there is no estimator."""

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters: one group, "policy", of those that the mean depends on."""
        parameters = [p for p in self.actor_network.parameters() if p.requires_grad]
        like = next(self.actor_network.parameters())
        # Asked of the graph: the noise and, in some policies, whole parts do not take part in the mean.
        widths = {
            key: len(mirror.index) for key, mirror in zip(self.actor_network.in_keys, self._mirrors, strict=False)
        }
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
        *mirrors, action_mirror = (mirror.to(self.symmetry_coeff.device) for mirror in self._mirrors)
        for key, mirror in zip(self.actor_network.in_keys, mirrors, strict=True):
            mirrored.set(key, mirror(observation.get(key)))
        # One pass over both: networks cost less in large batches.
        both = self.actor_network.get_dist_params(torch.stack([observation, mirrored])).get(self.tensor_keys.loc)
        error = (both[1] - action_mirror(both[0])).square().mean(-1)
        return TensorDict(
            {
                "loss_symmetry": self._reduce_loss(self.symmetry_coeff * error, tensordict),
                "symmetry_error": self._reduce_loss(error, tensordict, reduction="mean").detach(),
            }
        )
