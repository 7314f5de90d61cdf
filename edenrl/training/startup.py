"""What a run does before it trains: seeds, threads, device, other processes, and the check of its components."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from edenrl import distributed
from edenrl.config import RunConfig
from edenrl.envs import process_seed
from edenrl.training.exporting import require_export

__all__ = ["check_components", "setup"]


def setup(cfg: RunConfig) -> torch.device:
    """Seeds Python, NumPy and torch, sets the number of threads and returns the device that ``cfg.device`` means.

    Under ``torchrun`` it joins the other processes first. Each process seeds with ``cfg.seed`` plus its rank and takes
    another GPU, see ``edenrl.distributed``.

    Args:
        cfg: the configuration; it reads ``seed``, ``num_threads``, ``device`` and ``process_timeout``.

    Raises:
        ValueError: for a device that cannot be used here.

    Examples:
        >>> from edenrl.config import RunConfig
        >>> setup(RunConfig(device="cpu"))
        device(type='cpu')
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    try:
        device = torch.empty(0, device=distributed.local_device(cfg.device)).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={cfg.device!r} cannot be used here ({error}). Set --device cpu.") from None
    distributed.start(device, cfg.process_timeout)
    seed = process_seed(cfg.seed, distributed.rank())
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return device


def check_components(cfg: RunConfig, components: Mapping[str, Any], *, evaluates_policy: bool) -> None:
    """Refuses settings that the components of a run cannot serve, before the run leaves a directory.

    Args:
        cfg: the configuration; it reads ``collector``, ``num_workers`` and ``export``.
        components: what the run keeps, by name.
        evaluates_policy: whether evaluations play the component "policy".

    Raises:
        ValueError: for workers without a collector that has them, or a missing "policy".
    """
    workers = [getattr(component, "num_workers", None) for component in components.values()]
    if cfg.collector != "single" and cfg.num_workers not in workers:
        raise ValueError(f"This script collects in one process, not with {cfg.collector!r}. Set --collector single.")
    if evaluates_policy and "policy" not in components:
        raise ValueError(
            f"This run evaluates its component 'policy' in the environment; it keeps {sorted(components)}. Name the "
            "policy with keep(policy=...), or give Run(evaluate=...)."
        )
    if cfg.export:
        require_export(components)
