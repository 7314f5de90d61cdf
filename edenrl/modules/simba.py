"""SimBaV2: networks whose features and weights stay on the unit sphere, over encoded observation groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchrl.data import TensorSpec
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator

from edenrl.modules.actor_critic import StateIndependentStd, gaussian_actor
from edenrl.modules.normalization import RunningNorm

__all__ = [
    "GaussianSimBa",
    "GroupEncoder",
    "GroupSimBa",
    "HyperDense",
    "Scaler",
    "SimBa",
    "post_step_hook",
    "project_",
    "simba_actor",
    "simba_critic",
]

_EPS = 1e-8  # smallest norm that is divided by


def _l2(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=_EPS)


class HyperDense(nn.Linear):
    """A linear map without bias whose weight rows are unit vectors.

    The rows start orthogonal and of unit norm. An optimizer step moves them off the sphere; ``project_`` brings them
    back, and ``post_step_hook`` does so after every step.

    Args:
        in_features: width of the input.
        out_features: width of the output.

    Source: SimBaV2, arXiv:2502.15280.

    Examples:
        >>> layer = HyperDense(3, 2)
        >>> [round(norm, 5) for norm in layer.weight.norm(dim=1).tolist()]
        [1.0, 1.0]
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draws orthogonal rows (columns, where there are more rows than inputs) of unit norm."""
        nn.init.orthogonal_(self.weight)
        self.project_()

    @torch.no_grad()
    def project_(self) -> None:
        """Scales every row to unit norm, in place; a row of zeros stays."""
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True).clamp_min(_EPS))


class Scaler(nn.Module):
    """Multiplies features by a learned vector: ``x * s * init / scale``, where ``s`` starts at ``scale``.

    At the start it multiplies by ``init``; ``scale`` sets how fast an optimizer of fixed step size changes that.

    Args:
        dim: number of features.
        init: factor at the start.
        scale: start value of the learned vector.

    Source: SimBaV2, arXiv:2502.15280.

    Examples:
        >>> Scaler(2, init=0.5, scale=0.1)(torch.tensor([2.0, 4.0])).tolist()
        [1.0, 2.0]
    """

    def __init__(self, dim: int, init: float = 1.0, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), float(scale)))
        self.ratio = init / scale

    def forward(self, x: Tensor) -> Tensor:
        """Scales features of shape ``(*batch, dim)``."""
        return x * (self.weight * self.ratio)


class _Embedder(nn.Module):
    def __init__(self, in_features: int, dim: int, c_shift: float) -> None:
        super().__init__()
        self.w = HyperDense(in_features + 1, dim)
        self.scaler = Scaler(dim, math.sqrt(2 / dim), math.sqrt(2 / dim))
        self.c_shift = c_shift

    def forward(self, x: Tensor) -> Tensor:
        # The appended constant keeps the magnitude of the input, which the projection would lose.
        return _l2(self.scaler(self.w(_l2(F.pad(x, (0, 1), value=self.c_shift)))))


class _Block(nn.Module):
    def __init__(self, dim: int, expansion: int, alpha_init: float) -> None:
        super().__init__()
        start = math.sqrt(2 / dim) / math.sqrt(expansion)
        self.w1 = HyperDense(dim, expansion * dim)
        self.scaler = Scaler(expansion * dim, start, start)
        self.w2 = HyperDense(expansion * dim, dim)
        self.alpha = Scaler(dim, alpha_init, 1 / math.sqrt(dim))

    def forward(self, x: Tensor) -> Tensor:
        # The small constant: a row of dead units still has a direction.
        y = _l2(self.w2(F.relu(self.scaler(self.w1(x))) + 1e-8))
        return _l2(x + self.alpha(y - x))


class _Head(nn.Module):
    def __init__(self, dim: int, out_features: int) -> None:
        super().__init__()
        self.w1 = HyperDense(dim, dim)
        self.scaler = Scaler(dim)
        self.w2 = HyperDense(dim, out_features)
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.scaler(self.w1(x))) + self.bias


class SimBa(nn.Module):
    """SimBaV2: an embedding on the unit sphere, residual blocks that move along it, and a linear head.

    Every weight matrix is a ``HyperDense``, and training has to keep it one: call ``post_step_hook(optimizer)`` once,
    or ``project_()`` after each step. The output starts small, at most about one; scale targets to a few units.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        hidden_dim: width of the features on the sphere.
        num_blocks: residual blocks; each moves a learned fraction, at first 1 / (num_blocks + 1), towards its result.
        expansion: inner width of a block over ``hidden_dim``.
        c_shift: constant appended to the input before it is projected.

    Raises:
        ValueError: for a size below one, or a ``c_shift`` that is not positive.

    Source: SimBaV2, arXiv:2502.15280.

    Examples:
        >>> net = SimBa(17, 6, hidden_dim=32, num_blocks=1)
        >>> handle = net.post_step_hook(torch.optim.Adam(net.parameters()))
        >>> net(torch.zeros(4, 17)).shape
        torch.Size([4, 6])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden_dim: int = 512,
        num_blocks: int = 2,
        expansion: int = 4,
        c_shift: float = 3.0,
    ) -> None:
        super().__init__()
        sizes = dict(in_features=in_features, out_features=out_features, hidden_dim=hidden_dim)
        sizes |= dict(num_blocks=num_blocks, expansion=expansion)
        if wrong := {name: size for name, size in sizes.items() if size < 1}:
            raise ValueError(f"SimBa needs sizes of at least 1, got {wrong}.")
        if not c_shift > 0:
            raise ValueError(f"SimBa needs c_shift > 0, got {c_shift}.")
        self.embedder = _Embedder(in_features, hidden_dim, c_shift)
        blocks = [_Block(hidden_dim, expansion, 1 / (num_blocks + 1)) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.head = _Head(hidden_dim, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(*batch, in_features)`` to ``(*batch, out_features)``."""
        return self.head(self.blocks(self.embedder(x)))

    def project_(self) -> None:
        """Brings every weight row back to unit norm, in place."""
        project_(self)

    def post_step_hook(self, optimizer: torch.optim.Optimizer) -> RemovableHandle:
        """Projects after every step of ``optimizer``; see ``edenrl.modules.post_step_hook``."""
        return post_step_hook(optimizer, self)


def project_(module: nn.Module) -> None:
    """Brings the rows of every ``HyperDense`` in ``module`` back to unit norm, in place.

    Examples:
        >>> net = nn.Sequential(HyperDense(3, 2))
        >>> with torch.no_grad():
        ...     _ = net[0].weight.mul_(5.0)
        >>> project_(net)
        >>> [round(norm, 5) for norm in net[0].weight.norm(dim=1).tolist()]
        [1.0, 1.0]
    """
    for layer in module.modules():
        if isinstance(layer, HyperDense):
            layer.project_()


def post_step_hook(optimizer: torch.optim.Optimizer, *modules: nn.Module) -> RemovableHandle:
    """Projects every ``HyperDense`` in ``modules`` after each step of ``optimizer``, whoever calls it.

    Args:
        optimizer: any torch optimizer; with a gradient scaler or a closure too.
        modules: networks, actors or critics it trains.

    Returns:
        A handle; its ``remove()`` undoes the registration.

    Raises:
        ValueError: if the optimizer trains no ``HyperDense`` of ``modules``.

    Examples:
        >>> actor = simba_actor({"observation": 3}, 2, hidden_dim=8)
        >>> handle = post_step_hook(torch.optim.Adam(actor.parameters()), actor)
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layers = [
        m for module in modules for m in module.modules() if isinstance(m, HyperDense) and id(m.weight) in trained
    ]
    if not layers:
        raise ValueError(
            f"{type(optimizer).__name__} trains no HyperDense weight of the {len(modules)} given module(s), so there "
            "is nothing to project. Pass the networks whose parameters the optimizer holds."
        )

    def project(*_: Any) -> None:
        for layer in layers:
            layer.project_()

    return optimizer.register_step_post_hook(project)


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
            widths = {name: list(hidden.get(name, (256,))) for name in groups}
        else:
            widths = {name: list(hidden) for name in groups}
        self.encoders = nn.ModuleDict(
            {
                name: MLP(width, latent_dim, num_cells=widths[name], activation_class=nn.SiLU)
                for name, width in groups.items()
            }
        )
        self.out_features = latent_dim * len(groups)
        for mlp in self.encoders.values():
            layers = [layer for layer in mlp.modules() if isinstance(layer, nn.Linear)]
            for layer in layers:
                nn.init.orthogonal_(layer.weight, 1.0 if layer is layers[-1] else math.sqrt(2))
                nn.init.zeros_(layer.bias)

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
        x = torch.cat(groups, -1) if len(groups) > 1 else groups[0]
        if self.norm is not None:
            x = self.norm(x)
        if self.encoder is not None:
            x = self.encoder(*x.split(self.widths, -1))
        # The TorchScript tracer, which the older ONNX exporter uses, refuses compiled functions.
        return self.trunk.forward(x) if torch.jit.is_tracing() else self.trunk(x)

    def update_normalization(self, *groups: Tensor) -> None:
        """Merges a batch of inputs into the running statistics."""
        if self.norm is not None:
            self.norm.update(torch.cat(groups, -1) if len(groups) > 1 else groups[0])


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
        std = self.std()
        # Distribution maths stays in the parameter's precision also when the trunk runs in a reduced one.
        loc = super().forward(*groups).to(std.dtype)
        return loc, std.expand_as(loc)


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
    return ValueOperator(GroupSimBa(groups, num_values, num_blocks=num_blocks, **network), in_keys=list(groups))
