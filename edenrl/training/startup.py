"""What happens before a run builds anything: seeds, threads, device, other processes."""

from __future__ import annotations

import random

import numpy as np
import torch

from edenrl import distributed
from edenrl.config import RunConfig
from edenrl.envs import process_seed

__all__ = ["setup"]


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
