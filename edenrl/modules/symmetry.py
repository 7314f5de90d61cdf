"""Mirror symmetry: signed permutations, and batches doubled by their mirror image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

__all__ = ["MirrorAugmentation", "SignedPermutation"]


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

    def forward(self, x: Tensor) -> Tensor:
        """Mirrors the last dimension of ``x``, ``(*batch, width)``."""
        if x.shape[-1] != len(self.index):
            raise ValueError(f"A mirror of width {len(self.index)} was given a tensor of shape {tuple(x.shape)}.")
        return x[..., self.index] * self.sign.to(x.dtype)


class MirrorAugmentation:
    """Doubles a batch of transitions by their mirror images, for tasks that are symmetric.

    A mirrored transition has the mirrored observations (also under ``"next"``), the mirrored action and the mirrored
    ``loc`` and ``scale``; all the rest is that of the original: reward, flags, advantage, value, and the
    log-probability. It is what the mirrored policy would have collected, so that the probability ratio of the mirrored
    half weighs each action by how likely the policy is to take it there. (Were the log-probability computed anew at
    the mirrored observation, actions that the policy would hardly take had ratio 1 and destroyed the update.)

    Args:
        mirrors: ``SignedPermutation`` per observation key, and one under ``action_key``; those of entries that a batch
            lacks are ignored. An environment publishes them as ``env.mirrors``. None: batches are returned as they are.
        in_keys: what policy and critic read; each must have a mirror.
        action_key: of the action. Default ``"action"``.

    Raises:
        ValueError: something that is read has no mirror.

    Source: Mittal et al. 2024, "Symmetry Considerations for Learning Task Symmetric Robot Policies", arXiv:2403.04359.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from edenrl.modules import MirrorAugmentation, SignedPermutation
        >>> mirrors = {"observation": SignedPermutation([1, 0]), "action": SignedPermutation([0], [-1])}
        >>> batch = TensorDict(observation=torch.tensor([[1.0, 2.0]]), action=torch.ones(1, 1), batch_size=[1])
        >>> doubled = MirrorAugmentation(mirrors, ["observation"])(batch)
        >>> doubled["observation"], doubled["action"].flatten()
        (tensor([[1., 2.],
                [2., 1.]]), tensor([ 1., -1.]))
    """

    def __init__(
        self,
        mirrors: Mapping[str, SignedPermutation] | None,
        in_keys: Iterable[NestedKey] = (),
        *,
        action_key: str = "action",
        loc_key: NestedKey = "loc",
        scale_key: NestedKey = "scale",
    ) -> None:
        self.mirrors = mirrors
        self.action_key, self.loc_key, self.scale_key = action_key, loc_key, scale_key
        if mirrors is not None:
            missing = [key for key in dict.fromkeys([*in_keys, action_key]) if key not in mirrors]
            if missing:
                raise ValueError(
                    f"Symmetry needs a mirror for {missing}; the environment publishes {sorted(mirrors) or 'none'}. "
                    "Read other groups, or switch symmetry off."
                )

    def mirror(self, batch: TensorDictBase) -> TensorDictBase:
        """The mirror image of a batch of any shape; what is not mirrored is shared with it."""
        mirrored = batch.copy()
        for key, mirror in (self.mirrors or {}).items():
            for entry in (key, ("next", key)):
                if (value := batch.get(entry, None)) is not None:
                    mirrored.set(entry, mirror.to(value.device)(value))
        if self.mirrors:
            joints = self.mirrors[self.action_key]
            if (loc := batch.get(self.loc_key, None)) is not None:
                mirrored.set(self.loc_key, joints(loc))
            if (scale := batch.get(self.scale_key, None)) is not None:
                mirrored.set(self.scale_key, joints(scale).abs())
        return mirrored

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the batch followed by its mirror image along the first dimension."""
        return batch if self.mirrors is None else torch.cat([batch, self.mirror(batch)], 0)
