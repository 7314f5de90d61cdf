"""Networks over observation groups: an MLP with running normalization, and a learned standard deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules import MLP

from edenrl.modules.groups import require_layers
from edenrl.modules.normalization import RunningNorm

__all__ = ["GaussianMLP", "GroupMLP", "StateIndependentStd", "concatenate", "init_orthogonal_"]

_ACTIVATIONS: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}


def activation_class(name: str) -> type[nn.Module]:
    """The module of an activation: "elu", "relu", "tanh" or "silu".

    Raises:
        ValueError: for another name.
    """
    if name not in _ACTIVATIONS:
        raise ValueError(f"Unknown activation {name!r}; choose one of {sorted(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def concatenate(groups: tuple[Tensor, ...]) -> Tensor:
    """Observation groups side by side; a single one is returned as it is, without a copy."""
    return torch.cat(groups, -1) if len(groups) > 1 else groups[0]


def at_least(x: Tensor, parameter: Tensor) -> Tensor:
    """``x`` in the precision of a parameter, or its own if that is higher: an environment's numbers are float32."""
    return x.to(torch.promote_types(x.dtype, parameter.dtype))


def init_orthogonal_(network: nn.Module, last_gain: float = 1.0) -> None:
    """Makes the weights of the linear layers orthogonal, with gain sqrt(2), and their biases zero, in place.

    Args:
        network: its layers, in the order in which they were registered.
        last_gain: gain of the last layer.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)


class GroupMLP(nn.Module):
    """Concatenates its inputs, normalizes them with running statistics and applies an MLP.

    Weights are orthogonal (gain sqrt(2), ``last_gain`` on the last layer), biases zero.

    Args:
        in_features: summed width of the inputs.
        out_features: width of the output.
        hidden: widths of the hidden layers.
        activation: "elu", "relu", "tanh" or "silu".
        normalize: whether a ``RunningNorm`` (clipped at 10) stands in front.
        last_gain: gain of the last layer's orthogonal initialization.

    Examples:
        >>> net = GroupMLP(5, 2, hidden=(16,))
        >>> net(torch.zeros(7, 3), torch.zeros(7, 2)).shape
        torch.Size([7, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        hidden: Sequence[int] = (256, 128, 64),
        activation: str = "elu",
        normalize: bool = True,
        last_gain: float = 1.0,
    ) -> None:
        super().__init__()
        require_layers("GroupMLP", hidden=hidden)
        chosen = activation_class(activation)
        self.norm = RunningNorm(in_features, clip=10.0) if normalize else None
        self.mlp = MLP(in_features, out_features, num_cells=list(hidden), activation_class=chosen)
        init_orthogonal_(self.mlp, last_gain)

    def forward(self, *groups: Tensor) -> Tensor:
        """Maps groups of shape ``(*batch, width)`` to ``(*batch, out_features)``."""
        x = concatenate(groups)
        return self.mlp(at_least(x, self.mlp[0].weight) if self.norm is None else self.norm(x))

    def update_normalization(self, *groups: Tensor) -> None:
        """Merges a batch of inputs into the running statistics."""
        if self.norm is not None:
            self.norm.update(concatenate(groups))


def _squareplus(x: Tensor) -> Tensor:
    """``(x + sqrt(x^2 + 1)) / 2``, without cancellation for a large negative ``x``."""
    # Both branches use the magnitude, because the gradient of the branch that is not taken must be finite too. It is
    # not abs(x), whose gradient at zero is zero.
    magnitude = torch.where(x > 0, x, -x)
    large = 0.5 * (magnitude + (x.square() + 1.0).sqrt())
    return torch.where(x > 0, large, 0.25 / large)


class StateIndependentStd(nn.Module):
    """A learned standard deviation that cannot leave its bounds and never loses its gradient.

    The raw parameter is a log standard deviation with soft bounds, by the square-root form of softplus. Outside of the
    bounds the gradient decays like ``1 / distance**2``. That of a clamp would be zero, that of a softplus underflow.

    Args:
        dim: number of actions.
        init_std: initial standard deviation, exact.
        min_std: lower bound.
        max_std: upper bound, soft by a few percent; larger than ``init_std``.

    Examples:
        >>> std = StateIndependentStd(2, init_std=0.5)
        >>> [round(v, 4) for v in std().tolist()]
        [0.5, 0.5]
    """

    def __init__(self, dim: int, init_std: float = 1.0, min_std: float = 1e-3, max_std: float = 20.0) -> None:
        super().__init__()
        if not 0 < min_std < init_std < max_std:
            raise ValueError(f"Need 0 < min_std < init_std < max_std, got {min_std}, {init_std}, {max_std}.")
        self.low, self.high = math.log(min_std), math.log(max_std)
        # The inverse of forward(). squareplus(x) = y has the solution x = y - 1 / (4 y): for the lower bound, then for
        # the upper one.
        lower = math.log(init_std) - self.low
        upper = self.high - (self.low + lower - 0.25 / lower)
        self.raw_log_std = nn.Parameter(torch.full((dim,), self.high - (upper - 0.25 / upper)))

    def forward(self) -> Tensor:
        """Returns the standard deviation, shape ``(dim,)``."""
        log_std = self.high - _squareplus(self.high - self.raw_log_std)
        # The lower bound is applied last, so that it holds exactly.
        return (self.low + _squareplus(log_std - self.low)).exp()

    def beside(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """The mean ``(*batch, dim)`` and the standard deviation in its shape, both in the parameter's precision."""
        # A network that runs in a reduced precision gives a mean of that precision, which is too coarse for densities.
        std = self()
        loc = mean.to(std.dtype)
        return loc, std.expand_as(loc)


class GaussianMLP(GroupMLP):
    """A ``GroupMLP`` mean with a ``StateIndependentStd``; returns ``(loc, scale)``.

    Examples:
        >>> loc, scale = GaussianMLP(4, 2)(torch.zeros(3, 4))
        >>> loc.shape, scale.shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    def __init__(self, in_features: int, out_features: int, *, init_std: float = 1.0, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, last_gain=0.01, **kwargs)
        self.std = StateIndependentStd(out_features, init_std)

    def forward(self, *groups: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Maps groups of shape ``(*batch, width)`` to mean and standard deviation ``(*batch, out_features)``."""
        return self.std.beside(super().forward(*groups))
