"""Environments and evaluation as a run's configuration describes them."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.envs import EnvBase

from edenrl.config import RunConfig
from edenrl.envs import make_env, wrap_env
from edenrl.training.evaluation import evaluate

__all__ = ["build_env", "evaluate_run"]


def build_env(
    cfg: RunConfig, device: torch.device | str = "cpu", *, num_envs: int | None = None, seed: int | None = None
) -> EnvBase:
    """The environment of ``cfg.env`` as its simulator made it, with the exact specs a network is built from.

    Args:
        cfg: the configuration.
        device: device of the tensors.
        num_envs: rows; default ``cfg.env.num_envs``.
        seed: default ``cfg.seed``.
    """
    options = dict(cfg.env.kwargs)
    if cfg.env.vectorization != "sync":
        options["vectorization"] = cfg.env.vectorization
    return make_env(
        cfg.env.name,
        cfg.env.num_envs if num_envs is None else num_envs,
        device,
        cfg.seed if seed is None else seed,
        **options,
    )


def evaluate_run(
    cfg: RunConfig,
    policy: TensorDictModuleBase,
    device: torch.device | str = "cpu",
    *,
    num_episodes: int | None = None,
    seed: int | None = None,
) -> dict[str, float]:
    """Evaluates a policy as ``cfg.evaluation`` says, on unscaled rewards; see ``edenrl.training.evaluate``."""
    seed = cfg.evaluation.seed if seed is None else seed

    def make(rows: int) -> EnvBase:
        return wrap_env(build_env(cfg, device, num_envs=rows, seed=seed), action_mode=cfg.env.action_mode)

    return evaluate(policy, make, cfg.evaluation.num_episodes if num_episodes is None else num_episodes)
