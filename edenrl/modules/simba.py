"""SimBaV2: a network whose features and weights stay on the unit sphere."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from edenrl.modules.mlp import at_least
from edenrl.modules.projection import project_after_steps, require_sizes, unit_rows_

__all__ = ["HyperDense", "Scaler", "SimBa", "post_step_hook", "project_"]

_EPS = 1e-8  # smallest norm that is divided by


def _l2(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1, eps=_EPS)


@torch.no_grad()
def _project_loaded(layer: HyperDense, _: Any) -> None:
    # Rows that are on the sphere to rounding keep their bits, so that a run continues exactly.
    deviation = (torch.linalg.vector_norm(layer.weight, dim=-1, keepdim=True) - 1).abs()
    before = layer.weight.clone()
    layer.project_()
    layer.weight.copy_(torch.where(deviation < 16 * torch.finfo(before.dtype).eps, before, layer.weight))


class HyperDense(nn.Linear):
    """A linear map without bias whose weight rows are unit vectors.

    The rows start orthogonal and of unit norm. An optimizer step moves them off the sphere; ``project_`` brings them
    back, and ``post_step_hook`` does so after every step. ``load_state_dict`` projects rows that come without unit
    norm; it leaves the others as they are, bit for bit.

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
        self.register_load_state_dict_post_hook(_project_loaded)

    def reset_parameters(self) -> None:
        """Draws orthogonal rows (columns, where there are more rows than inputs) of unit norm."""
        nn.init.orthogonal_(self.weight)
        self.project_()

    def project_(self) -> None:
        """Scales every row to unit norm, in place; a row of zeros stays."""
        unit_rows_(self.weight)


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
        # The small constant gives a direction also to a row whose units are all zero.
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
        require_sizes(
            "SimBa",
            in_features=in_features,
            out_features=out_features,
            hidden_dim=hidden_dim,
            num_blocks=num_blocks,
            expansion=expansion,
        )
        if not c_shift > 0:
            raise ValueError(f"SimBa needs c_shift > 0, got {c_shift}.")
        self.embedder = _Embedder(in_features, hidden_dim, c_shift)
        blocks = [_Block(hidden_dim, expansion, 1 / (num_blocks + 1)) for _ in range(num_blocks)]
        self.blocks = nn.Sequential(*blocks)
        self.head = _Head(hidden_dim, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(*batch, in_features)`` to ``(*batch, out_features)``."""
        return self.head(self.blocks(self.embedder(at_least(x, self.head.bias))))

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
        >>> net = SimBa(3, 2, hidden_dim=8)
        >>> handle = post_step_hook(torch.optim.Adam(net.parameters()), net)
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
    return project_after_steps(optimizer, layers)
