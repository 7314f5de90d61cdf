"""Mirror symmetry: signed permutations, and batches doubled by their mirror image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor, nn

from edenrl.modules.groups import GroupModule, GroupValue
from edenrl.modules.mlp import StateIndependentStd
from edenrl.modules.squash import PRE_SQUASH, squashed_log_prob

__all__ = ["MirrorAugmentation", "SignedPermutation", "check_mirror_widths", "network_widths"]


class SignedPermutation(nn.Module):
    """Mirrors a vector by reordering its components and flipping signs; applied twice it changes nothing.

    Args:
        index: the component that each output takes.
        sign: +1 or -1 for each output. Default: all +1.

    Raises:
        ValueError: other signs, lengths that differ, or a map that is not its own inverse.

    Examples:
        >>> import torch
        >>> from edenrl.modules import SignedPermutation
        >>> mirror = SignedPermutation([1, 0, 2], [1, 1, -1])
        >>> mirror(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[ 2.,  1., -3.]])
    """

    index: Tensor
    sign: Tensor

    def __init__(self, index: Sequence[int], sign: Sequence[float] | None = None) -> None:
        super().__init__()
        index = [int(entry) for entry in index]
        signs = [1.0] * len(index) if sign is None else [float(entry) for entry in sign]
        if len(signs) != len(index) or any(abs(entry) != 1.0 for entry in signs):
            raise ValueError(f"sign={signs} was given; expected one +1 or -1 for each of the {len(index)} indices.")
        if sorted(index) != list(range(len(index))):
            raise ValueError(f"index={index} was given; expected each of 0..{len(index) - 1} once.")
        wrong = [i for i, j in enumerate(index) if index[j] != i or signs[i] * signs[j] != 1.0]
        if wrong:
            raise ValueError(
                f"Mirroring twice does not give back components {wrong}: index={index}, sign={signs}. A component and "
                "its partner must point at each other with equal signs."
            )
        self.register_buffer("index", torch.tensor(index), persistent=False)
        self.register_buffer("sign", torch.tensor(signs), persistent=False)

    @classmethod
    def from_function(cls, mirror: Callable[[Tensor], Tensor], width: int) -> SignedPermutation:
        """The signed permutation that a function of vectors applies.

        Args:
            mirror: maps ``(*batch, width)`` to the mirror image of the same shape.
            width: of the vectors.

        Raises:
            ValueError: the function does something else, or is not its own inverse.

        Examples:
            >>> SignedPermutation.from_function(lambda x: torch.cat([x[..., 1:], x[..., :1]], -1), 2).index.tolist()
            [1, 0]
        """
        columns = mirror(torch.eye(width))
        if columns.shape != (width, width):
            raise ValueError(
                f"The mirror maps vectors of width {width} to {tuple(columns.shape[1:])}; expected the same width."
            )
        index = columns.abs().argmax(0).tolist()
        found = cls(index, columns[index, range(width)].tolist())
        x = -torch.linspace(1.0, 2.0, width)
        if not torch.equal(mirror(x), found(x)):
            raise ValueError(
                f"The mirror is no reordering with signs: it maps {x.tolist()} to {mirror(x).tolist()}, and unit "
                f"vectors as index={index}, sign={found.sign.tolist()}."
            )
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Mirrors the last dimension of ``x``, ``(*batch, width)``."""
        if x.shape[-1] != len(self.index):
            raise ValueError(f"A mirror of width {len(self.index)} was given a tensor of shape {tuple(x.shape)}.")
        return x[..., self.index] * self.sign.to(x.dtype)


def check_mirror_widths(mirrors: Mapping[Any, SignedPermutation], widths: Mapping[Any, int]) -> None:
    """Raises unless every mirror is as wide as its entry.

    Args:
        mirrors: by key.
        widths: of the entries, by the same keys; others are not compared.

    Raises:
        ValueError: naming the entry and both widths.

    Examples:
        >>> check_mirror_widths({"policy": SignedPermutation([1, 0])}, {"policy": 3})
        Traceback (most recent call last):
        ...
        ValueError: The mirror of 'policy' has 2 entries, and 'policy' has 3. Correct the environment's mirrors.
    """
    for key, mirror in mirrors.items():
        width = len(mirror.index)
        if widths.get(key, width) != width:
            raise ValueError(
                f"The mirror of {key!r} has {width} entries, and {key!r} has {widths[key]}. Correct the environment's "
                "mirrors."
            )


def network_widths(*networks: nn.Module | None, action_key: str = "action") -> dict[Any, int]:
    """Widths of what networks of this library read and, for a Gaussian actor, of its action.

    Args:
        networks: actor and critic; None is left out.
        action_key: name of the action.

    Examples:
        >>> from edenrl.modules import gaussian_actor
        >>> network_widths(gaussian_actor({"policy": 3}, 2))
        {'policy': 3, 'action': 2}
    """
    widths: dict[Any, int] = {}
    for network in networks:
        for module in () if network is None else network.modules():
            if isinstance(module, GroupModule | GroupValue):
                widths |= module.widths
            elif isinstance(module, StateIndependentStd):
                widths[action_key] = len(module.raw_log_std)
    return widths


class MirrorAugmentation:
    """Doubles a batch of transitions by their mirror images, for tasks that are symmetric.

    A mirrored transition has the mirrored observations (also under ``"next"``) and the mirrored action. Reward, flags,
    advantage, value and log-probability are those of the original: it is what the mirrored policy would have collected.
    The probability ratio then weighs each mirrored action by how likely the policy is to take it there.

    With ``log_prob="mirrored"`` the log-probability is that of the policy at the mirrored observation instead. The
    ratio then starts at 1, also for actions that the policy would hardly take. That destroys the update of a policy
    that is far from symmetric.

    ``loc`` and ``scale`` are those of the policy at the mirrored observation. Their KL divergence from the policy that
    is optimized therefore measures how far that one has moved, and not how asymmetric it was.

    A rollout ``[N, T]`` becomes ``[2N, T]``. If it is doubled before the advantages are estimated, the mirror image
    gets its own values and returns. If it is doubled afterwards, the mirror image has those of the original.

    Args:
        mirrors: ``SignedPermutation`` per observation key, and one under ``action_key``; those of entries that a batch
            lacks are ignored. An environment publishes them as ``env.mirrors``. None: batches are returned as they are.
        policy: the actor at collection.
        critic: if given, what it reads must have mirrors, too.
        also: further keys that must have mirrors, because a loss reads them that neither actor nor critic does.
        action_key: of the action. Default ``"action"``.
        log_prob: "original" (default) or "mirrored".

    Raises:
        ValueError: something that is read has no mirror or one of another width, or another ``log_prob``.

    Source: Mittal et al. 2024, "Symmetry Considerations for Learning Task Symmetric Robot Policies", arXiv:2403.04359.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import MirrorAugmentation, SignedPermutation, gaussian_actor
        >>> mirrors = {"observation": SignedPermutation([1, 0]), "action": SignedPermutation([0], [-1])}
        >>> actor = gaussian_actor({"observation": 2}, 1)
        >>> batch = actor(TensorDict(observation=torch.tensor([[1.0, 2.0]]), batch_size=[1])).detach()
        >>> doubled = MirrorAugmentation(mirrors, actor)(batch)
        >>> doubled["observation"]
        tensor([[1., 2.],
                [2., 1.]])
        >>> bool(doubled["action"][1] == -doubled["action"][0])
        True
    """

    def __init__(
        self,
        mirrors: Mapping[str, SignedPermutation] | None,
        policy: ProbabilisticTensorDictSequential,
        critic: TensorDictModuleBase | None = None,
        *,
        also: Iterable[str] = (),
        action_key: str = "action",
        log_prob: Literal["original", "mirrored"] = "original",
    ) -> None:
        if log_prob not in ("original", "mirrored"):
            raise ValueError(f"log_prob must be 'original' or 'mirrored', got {log_prob!r}.")
        self.mirrors, self.policy, self.action_key, self.log_prob = mirrors, policy, action_key, log_prob
        if mirrors is not None:
            read = [*policy.in_keys, *(critic.in_keys if critic is not None else []), *also, action_key]
            missing = [key for key in dict.fromkeys(read) if key not in mirrors]
            if missing:
                raise ValueError(
                    f"Symmetry needs a mirror for {missing}; the environment publishes {sorted(mirrors) or 'none'}. "
                    "Read other groups, or switch symmetry off."
                )
            check_mirror_widths(mirrors, network_widths(policy, critic, action_key=action_key))

    def mirror(self, batch: TensorDictBase) -> TensorDictBase:
        """The mirror image of a batch of any shape, without the policy's own numbers; the rest is shared."""
        mirrored = batch.copy()
        for key, mirror in (self.mirrors or {}).items():
            for entry in (key, ("next", key)):
                if (value := batch.get(entry, None)) is not None:
                    mirrored.set(entry, mirror.to(value.device)(value))
        # A squashed action is mirrored by mirroring the sample before the tanh.
        if self.mirrors is not None and (sample := batch.get(PRE_SQUASH, None)) is not None:
            mirrored.set(PRE_SQUASH, self.mirrors[self.action_key].to(sample.device)(sample))
        return mirrored

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the batch followed by its mirror image along the first dimension."""
        if self.mirrors is None:
            return batch
        mirrored = self.mirror(batch)
        parameters = self.policy.get_dist_params(mirrored.select(*self.policy.in_keys))
        for key in set(parameters.keys(True, True)) - set(self.policy.in_keys):
            if batch.get(key, None) is not None:
                mirrored.set(key, parameters.get(key))
        if self.log_prob == "mirrored":
            distribution = self.policy.build_dist_from_params(parameters)
            if PRE_SQUASH in self.policy.out_keys:
                log_prob = squashed_log_prob(distribution, mirrored.get(PRE_SQUASH))
            else:
                log_prob = distribution.log_prob(mirrored.get(self.action_key))
            mirrored.set(self.policy[-1].log_prob_key, log_prob)
        return torch.cat([batch, mirrored], 0)
