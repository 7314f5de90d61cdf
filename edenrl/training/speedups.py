"""Reduced precision and compilation, where they speed anything up."""

from __future__ import annotations

import logging
from typing import Literal

import torch

__all__ = ["speedups"]

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
