"""Policies as files that run without torch: ONNX, TorchScript and torch.export graphs with a written contract.

Importing this package loads neither torch nor pydantic: on a robot ``load_policy`` needs NumPy and onnxruntime only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edenrl.export.contract import nominal_env
    from edenrl.export.exporter import export_policy
    from edenrl.export.formats import check_formats
    from edenrl.export.graph import PolicyGraph
    from edenrl.export.runtime import RuntimePolicy, load_policy
    from edenrl.export.spec import EnvContract, PolicySpec
    from edenrl.export.verification import VerificationError

__all__ = [
    "EnvContract",
    "PolicyGraph",
    "PolicySpec",
    "RuntimePolicy",
    "VerificationError",
    "check_formats",
    "export_policy",
    "load_policy",
    "nominal_env",
]

_HOME = {
    "EnvContract": "spec",
    "PolicyGraph": "graph",
    "PolicySpec": "spec",
    "RuntimePolicy": "runtime",
    "VerificationError": "verification",
    "check_formats": "formats",
    "export_policy": "exporter",
    "load_policy": "runtime",
    "nominal_env": "contract",
}


def __getattr__(name: str) -> Any:
    # Names are looked up when first used, so that a deployment never imports what only exporting needs.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
