"""Running statistics that travel with the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from edenrl.modules.moments import merge_moments

__all__ = ["RunningNorm"]


_SHRINK = 2.0**-32


def root(var: Tensor, dtype: torch.dtype, plus: float = 0.0) -> Tensor:
    """``sqrt(var + plus)`` in a precision that may be too small for the variance itself."""
    # A power of two changes no digit.
    return ((var * _SHRINK**2).to(dtype) + plus * _SHRINK**2).sqrt() / _SHRINK


class RunningNorm(nn.Module):
    """Normalizes features with running mean and standard deviation: ``(x - mean) / (std + eps)``.

    The statistics are buffers, so they are saved, exported and moved with the network that owns them. ``forward`` never
    changes them; ``update`` merges a batch (parallel variance of Chan et al., 1979), but not in ``eval()`` mode.
    Before the first update the module divides by ``1 + eps``. Processes that train together (``edenrl.distributed``)
    all merge the batches of all, so every one of them must call ``update``.

    Mean and variance are float64 whatever the module is cast to (in float32 they would stop moving after some 1e7
    samples), so it needs a device that has float64. The output has the module's precision, or that of ``x`` if higher.
    In half precision it is computed in float32.

    Args:
        shape: shape of one observation, or its width. Leading dimensions of the input are batch dimensions.
        mask: boolean tensor of ``shape``; features where it is ``False`` pass through unchanged (commands, one-hots).
        clip: bound on the magnitude of the normalized features, or ``None``.
        eps: added to the standard deviation. The default, 1e-2, is rsl_rl's: a constant feature stays small.

    Raises:
        ValueError: if an update holds NaN or infinity, naming the first such feature.

    Examples:
        >>> norm = RunningNorm(2)
        >>> norm.update(torch.tensor([[0.0, 10.0], [2.0, 14.0]]))
        >>> norm.mean.tolist(), norm.var.tolist(), int(norm.count)
        ([1.0, 12.0], [1.0, 4.0], 2)
        >>> [round(v, 4) for v in norm(torch.tensor([2.0, 12.0])).tolist()]
        [0.9901, 0.0]
    """

    mean: Tensor
    var: Tensor
    count: Tensor
    mask: Tensor | None

    def __init__(
        self,
        shape: int | Sequence[int],
        mask: Tensor | None = None,
        clip: float | None = None,
        eps: float = 1e-2,
    ) -> None:
        super().__init__()
        self.shape = torch.Size([shape] if isinstance(shape, int) else shape)
        if mask is not None and (mask.shape != self.shape or mask.dtype != torch.bool):
            raise ValueError(
                f"RunningNorm needs a bool mask of shape {tuple(self.shape)}, got {mask.dtype} {tuple(mask.shape)}."
            )
        if clip is not None and clip <= 0 or eps <= 0:
            raise ValueError(f"RunningNorm needs clip > 0 (or None) and eps > 0, got clip={clip}, eps={eps}.")
        self.clip, self.eps = clip, eps
        self.dtype = torch.get_default_dtype()
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalized features, same shape as ``x``."""
        self._require_shape(x)
        dtype = torch.promote_types(x.dtype, self.dtype)
        # In half precision the variance of a feature in the hundreds would be infinite.
        wide = torch.promote_types(dtype, torch.float32)
        out = (x.to(wide) - self.mean.to(wide)) / (root(self.var, wide) + self.eps)
        if self.clip is not None:
            out = out.clamp(-self.clip, self.clip)
        out = out.to(dtype)
        return out if self.mask is None else torch.where(self.mask, out, x)

    def _require_shape(self, x: Tensor) -> None:
        # A single feature would be broadcast to all.
        if x.shape[-len(self.shape) :] != self.shape:
            raise ValueError(f"RunningNorm of shape {tuple(self.shape)} was given features of shape {tuple(x.shape)}.")

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merges a batch of shape ``(*batch, *shape)`` into the statistics (training mode only)."""
        if not self.training:
            return
        self._require_shape(x)
        rows = x.reshape(-1, *self.shape).double()
        if not torch.isfinite(rows.sum()):
            bad = (~torch.isfinite(rows)).nonzero()
            raise ValueError(
                f"RunningNorm refuses non-finite input: {len(bad)} value(s), the first in row {int(bad[0, 0])}, "
                f"feature {bad[0, 1:].tolist()}. Fix the environment that produced it."
            )
        # Mean and variance of no rows would be NaN. Such a batch still takes part, because other processes wait for it.
        own = rows if len(rows) else rows.new_zeros(1, *self.shape)
        count, mean, var = merge_moments(len(rows), own.mean(0), own.var(0, unbiased=False))
        if not count:
            return
        total = self.count + count
        share = count / total.double()
        delta = mean - self.mean
        # The last term is the spread between the two means, which is part of the merged variance.
        self.var.copy_(self.var + (var - self.var) * share + delta.square() * share * (1 - share))
        self.mean.copy_(self.mean + delta * share)
        self.count.copy_(total)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningNorm:
        """Keeps the statistics in float64: every cast and move of a module comes through here."""
        exact = self.mean, self.var
        super()._apply(fn, recurse)
        self.dtype = fn(torch.zeros((), dtype=self.dtype, device=exact[0].device)).dtype
        if self.mean.dtype != torch.float64:
            self.mean, self.var = (entry.to(self.count.device) for entry in exact)
        return self

    def extra_repr(self) -> str:
        """Shape and options for ``repr``."""
        return f"{tuple(self.shape)}, clip={self.clip}, eps={self.eps}, masked={self.mask is not None}"
