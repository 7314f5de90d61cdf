"""Reduced precision and compilation, where they speed anything up."""

from __future__ import annotations

import copy
import logging
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

__all__ = ["check_precision", "speedups"]

_log = logging.getLogger("edenrl")


def speedups(
    precision: Literal["float32", "bfloat16", "float16"], compile: bool, device: torch.device
) -> tuple[torch.dtype | None, bool]:
    """What ``GradientStep(amp_dtype=...)`` gets and whether to compile, for a device.

    On a CPU both stay off, with one warning: small networks only lose there.

    Examples:
        >>> speedups("float32", False, torch.device("cpu"))
        (None, False)
    """
    reduced = None if precision == "float32" else getattr(torch, precision)
    if device.type != "cpu" or (reduced is None and not compile):
        return reduced, compile
    _log.warning("On a CPU training stays in float32 and uncompiled; precision=%s, compile=%s.", precision, compile)
    return None, False


def check_precision(loss: nn.Module, batch: TensorDictBase, dtype: torch.dtype | None) -> None:
    """Refuses a reduced precision in which the first update is not that of float32.

    Both are computed on a copy of the loss, from the same batch and random numbers. What the loss returns must agree
    within 1 % (and 0.01), the gradient of every parameter group in its direction (cosine at least 0.9) and within 10 %
    in its norm. Reduced precision that fails here does not end in NaN: a temperature that no longer moves, or a policy
    that no longer improves, looks like a training run.

    Args:
        loss: the LossModule; its ``parameter_groups()`` are compared one by one.
        batch: data of the first update.
        dtype: the reduced precision, ``torch.bfloat16`` or ``torch.float16``; None: there is nothing to check.

    Raises:
        ValueError: naming what differs, with both values.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> net = TensorDictModule(nn.Linear(3, 1), ["observation"], ["loss_value"])
        >>> check_precision(net, TensorDict(observation=torch.ones(3)), torch.bfloat16)
    """
    if dtype is None:
        return
    device = next(loss.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        exact, reduced = (_first_update(loss, batch, device.type, chosen) for chosen in (None, dtype))
    wrong = [f"{name} {a:.5g} and not {b:.5g}" for name, a, b in _differences(reduced, exact)]
    if wrong:
        raise ValueError(
            f"In {str(dtype).removeprefix('torch.')} the first update is not that of float32: {', '.join(wrong)}. Set "
            "algorithm.precision to float32 (or try the other reduced one)."
        )


def _first_update(
    loss: nn.Module, batch: TensorDictBase, device: str, dtype: torch.dtype | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Scalars that the loss returns, and the gradient of every parameter group as one vector."""
    torch.manual_seed(0)
    loss = copy.deepcopy(loss)
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        out = loss(batch.clone())
    scalars = {str(name): value.detach().float() for name, value in out.items() if value.numel() == 1}
    scale = 2.0**10  # as a gradient scaler does: float16 has no small gradients
    sum(value.sum() * scale for name, value in out.items() if str(name).startswith("loss_")).backward()
    declared: Any = getattr(loss, "parameter_groups", lambda: {"all": list(loss.parameters())})
    flat = {
        name: torch.cat([p.grad.flatten().float() / scale for p in group if p.grad is not None])
        for name, group in declared().items()
        if any(p.grad is not None for p in group)
    }
    return scalars, flat


def _differences(reduced: Any, exact: Any) -> list[tuple[str, float, float]]:
    found = []
    for name, value in exact[0].items():
        if not torch.allclose(reduced[0][name], value, rtol=0.01, atol=0.01):
            found.append((name, float(reduced[0][name]), float(value)))
    for name, gradient in exact[1].items():
        other = reduced[1][name]
        norm, length = gradient.norm(), other.norm()
        # As products, not quotients: a gradient of zero in both is the same.
        if not (length - norm).abs() <= 0.1 * norm:
            found.append((f"gradient norm of {name}", float(length), float(norm)))
        elif not other @ gradient >= 0.9 * length * norm:
            found.append((f"cosine of the gradients of {name}", float(other @ gradient / (length * norm)), 1.0))
    return found
