"""Actors and critics on a SimBaV2 trunk, with an encoder for each observation group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.data import TensorSpec
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator

from edenrl.modules.actor_critic import gaussian_actor
from edenrl.modules.groups import GroupValue, require_groups, require_layers
from edenrl.modules.mlp import StateIndependentStd, concatenate, init_orthogonal_
from edenrl.modules.normalization import RunningNorm
from edenrl.modules.simba import SimBa

__all__ = ["GaussianSimBa", "GroupEncoder", "GroupSimBa", "simba_actor", "simba_critic"]


class GroupEncoder(nn.Module):
    """One SiLU MLP per observation group; their outputs, of ``latent_dim`` each, are concatenated.

    Weights are orthogonal (gain sqrt(2), 1 on the last layer), biases zero.

    Args:
        groups: observation groups and widths, e.g. ``{"policy": 45, "scan": 132}``.
        hidden: widths of the hidden layers: one sequence for all groups, or a dict of them by group, where a group that
            is left out has (256,).
        latent_dim: output width per group.

    Raises:
        ValueError: if ``hidden`` names a group that does not exist, listing the groups.

    Examples:
        >>> encoder = GroupEncoder({"policy": 45, "scan": 132}, hidden={"scan": (512, 256)}, latent_dim=64)
        >>> encoder(torch.zeros(4, 45), torch.zeros(4, 132)).shape
        torch.Size([4, 128])
    """

    def __init__(
        self,
        groups: Mapping[str, int],
        hidden: Sequence[int] | Mapping[str, Sequence[int]] = (256,),
        latent_dim: int = 128,
    ) -> None:
        super().__init__()
        if isinstance(hidden, Mapping):
            if unknown := set(hidden) - set(groups):
                raise ValueError(f"Encoder widths are given for {sorted(unknown)}; the groups are {dict(groups)}.")
            require_layers("GroupEncoder", **{f"hidden[{name!r}]": layers for name, layers in hidden.items()})
            widths = {name: list(hidden.get(name, (256,))) for name in groups}
        else:
            require_layers("GroupEncoder", hidden=hidden)
            widths = {name: list(hidden) for name in groups}
        self.encoders = nn.ModuleDict(
            {
                name: MLP(width, latent_dim, num_cells=widths[name], activation_class=nn.SiLU)
                for name, width in groups.items()
            }
        )
        self.out_features = latent_dim * len(groups)
        for mlp in self.encoders.values():
            init_orthogonal_(mlp)

    def forward(self, *groups: Tensor) -> Tensor:
        """Maps one ``(*batch, width)`` per group, in order, to ``(*batch, latent_dim * number of groups)``."""
        return torch.cat([encode(x) for encode, x in zip(self.encoders.values(), groups, strict=True)], -1)


class GroupSimBa(nn.Module):
    """Observation groups, running normalization, group encoders and a SimBa trunk, in this order.

    Args:
        groups: observation groups and widths.
        out_features: width of the output.
        encoder_hidden: hidden widths of ``GroupEncoder``; ``None`` feeds the observations to the trunk as they are.
        latent_dim: output width of each encoder.
        normalize: whether a ``RunningNorm`` (clipped at 10) of the concatenated observation stands in front.
        compile: run the trunk through ``torch.compile``; a string names the backend. State dict and exports do not know
            of it, and copies run uncompiled.
        trunk: options of ``SimBa``: hidden_dim, num_blocks, expansion, c_shift.

    Examples:
        >>> net = GroupSimBa({"policy": 45, "scan": 132}, 12, hidden_dim=64)
        >>> net(torch.zeros(4, 45), torch.zeros(4, 132)).shape
        torch.Size([4, 12])
    """

    def __init__(
        self,
        groups: Mapping[str, int],
        out_features: int,
        *,
        encoder_hidden: Sequence[int] | Mapping[str, Sequence[int]] | None = (256,),
        latent_dim: int = 128,
        normalize: bool = True,
        compile: bool | str = False,
        **trunk: Any,
    ) -> None:
        super().__init__()
        self.widths = list(groups.values())
        self.norm = RunningNorm(sum(self.widths), clip=10.0) if normalize else None
        self.encoder = None if encoder_hidden is None else GroupEncoder(groups, encoder_hidden, latent_dim)
        features = sum(self.widths) if self.encoder is None else self.encoder.out_features
        self.trunk = SimBa(features, out_features, **trunk)
        if compile:
            # In place: a wrapper module would put a prefix before every key of the state dict.
            self.trunk.compile(**({"backend": compile} if isinstance(compile, str) else {}))

    def forward(self, *groups: Tensor) -> Tensor:
        """Maps groups of shape ``(*batch, width)`` to ``(*batch, out_features)``."""
        x = concatenate(groups)
        if self.norm is not None:
            x = self.norm(x)
        if self.encoder is not None:
            x = self.encoder(*x.split(self.widths, -1))
        # The TorchScript tracer, which the older ONNX exporter uses, refuses compiled functions.
        return self.trunk.forward(x) if torch.jit.is_tracing() else self.trunk(x)

    def update_normalization(self, *groups: Tensor) -> None:
        """Merges a batch of inputs into the running statistics."""
        if self.norm is not None:
            self.norm.update(concatenate(groups))


class GaussianSimBa(GroupSimBa):
    """A ``GroupSimBa`` mean with a ``StateIndependentStd``; returns ``(loc, scale)``.

    Examples:
        >>> loc, scale = GaussianSimBa({"observation": 4}, 2, hidden_dim=8)(torch.zeros(3, 4))
        >>> loc.shape, scale.shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def __init__(self, groups: Mapping[str, int], out_features: int, *, init_std: float = 1.0, **network: Any) -> None:
        super().__init__(groups, out_features, **network)
        self.std = StateIndependentStd(out_features, init_std)

    def forward(self, *groups: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Maps groups of shape ``(*batch, width)`` to mean and standard deviation ``(*batch, out_features)``."""
        return self.std.beside(super().forward(*groups))


def simba_actor(
    groups: Mapping[str, int],
    action_spec: TensorSpec | int,
    *,
    num_blocks: int = 1,
    squash: bool = False,
    **network: Any,
) -> ProbabilisticActor:
    """Diagonal Gaussian actor on a SimBa trunk; the standard deviation (1.0 at first) does not depend on the state.

    Writes ``loc``, ``scale``, ``action`` and ``action_log_prob``, as ``gaussian_actor`` does, and drops into its place.
    Register ``post_step_hook(optimizer, actor, critic)`` on the optimizer.

    Args:
        groups: observation groups and widths, e.g. ``{"policy": 45, "scan": 132}``, read in this order.
        action_spec: the environment's unbatched action spec, or the number of actions.
        num_blocks: residual blocks.
        squash: map actions into the spec's box with a tanh.
        network: options of ``GaussianSimBa``: hidden_dim, expansion, c_shift, encoder_hidden, latent_dim, normalize,
            init_std, compile.

    Raises:
        ValueError: for an action spec that is not a floating-point vector, ``squash`` without finite bounds, or encoder
            widths for a group that is not in ``groups``.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = simba_actor({"policy": 45, "scan": 132}, 12, hidden_dim=64, encoder_hidden={"scan": (512, 256)})
        >>> td = actor(TensorDict(policy=torch.zeros(4, 45), scan=torch.zeros(4, 132), batch_size=[4]))
        >>> td["action"].shape, td["action_log_prob"].shape
        (torch.Size([4, 12]), torch.Size([4]))
    """
    return gaussian_actor(groups, action_spec, squash=squash, build=GaussianSimBa, num_blocks=num_blocks, **network)


def simba_critic(
    groups: Mapping[str, int], num_values: int = 1, *, num_blocks: int = 2, **network: Any
) -> ValueOperator:
    """State-value critic on a SimBa trunk; writes ``state_value`` of shape ``(*batch, num_values)``.

    Args:
        groups: observation groups and widths, read in this order.
        num_values: number of independent value heads.
        num_blocks: residual blocks.
        network: options of ``GroupSimBa``: hidden_dim, expansion, c_shift, encoder_hidden, latent_dim, normalize,
            compile.

    Examples:
        >>> from tensordict import TensorDict
        >>> critic = simba_critic({"critic": 48}, hidden_dim=64)
        >>> critic(TensorDict(critic=torch.zeros(4, 48), batch_size=[4]))["state_value"].shape
        torch.Size([4, 1])
    """
    require_groups("simba_critic", groups)
    return GroupValue(GroupSimBa(groups, num_values, num_blocks=num_blocks, **network), groups)
