"""Environments and evaluation as a run's configuration describes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.modules.utils import get_primers_from_module

from edenrl import distributed
from edenrl.config import EnvConfig, RunConfig
from edenrl.envs import action_box, bound_actions, make_env, process_seed, spawn_seeds, wrap_env
from edenrl.modules import make_actor, observation_groups, value_critic
from edenrl.training.evaluation import OnStep, evaluate

_log = logging.getLogger("edenrl")

__all__ = [
    "append_primers",
    "build_env",
    "evaluate_run",
    "make_critic",
    "make_policy",
    "symmetry_mirrors",
    "collector_options",
]


def build_env(
    cfg: RunConfig, device: torch.device | str = "cpu", *, num_envs: int | None = None, seed: int | None = None
) -> EnvBase:
    """The environment of ``cfg.env`` as its simulator made it, with the exact specs a network is built from.

    Where it declares no action bounds and ``cfg.algorithm`` has an ``action_bound_scale``, it gets a box of that size,
    and the log says so. All other functions here build the environment with the same box.

    Args:
        cfg: the configuration.
        device: device of the tensors.
        num_envs: rows; default ``cfg.env.num_envs``, or 1 where ``cfg.collector`` leaves the stepping to workers.
        seed: default ``cfg.seed``; under ``torchrun`` an independent one for each process.
    """
    if num_envs is None:
        num_envs = cfg.env.num_envs if cfg.collector == "single" else 1
    if seed is None:
        seed = process_seed(cfg.seed, distributed.rank())
    env = _build(cfg.env, num_envs, device, seed)
    declared = action_box(env)
    env = _with_box(env, cfg.action_bound_scale)
    if declared is None and action_box(env) is not None:
        _log.warning(
            "%s declares no action bounds. The policy acts in the box [-%g, %g] of algorithm.action_bound_scale.",
            cfg.env.name,
            cfg.action_bound_scale,
            cfg.action_bound_scale,
        )
    return env


def make_policy(cfg: Any, env: EnvBase) -> ProbabilisticTensorDictSequential:
    """The multi-layer perceptron that ``cfg.algorithm`` describes, for an environment as ``build_env`` returns it.

    A trainer script uses this function or defines its own. ``examples/evaluate.py`` rebuilds a run with the same one.

    Args:
        cfg: a configuration whose ``algorithm`` has the actor's groups, widths, activation, normalization and noise.
        env: the environment whose observations and actions it is for.

    Examples:
        >>> from types import SimpleNamespace
        >>> from edenrl.config import PPOConfig, RunConfig
        >>> cfg = SimpleNamespace(env=RunConfig().env, algorithm=PPOConfig(actor_hidden=(8,)))
        >>> make_policy(cfg, make_env("PointMass", 2)).in_keys
        ['observation']
    """
    algo = cfg.algorithm
    return make_actor(
        observation_groups(env.observation_spec, algo.actor_groups),
        env.action_spec_unbatched,
        hidden=algo.actor_hidden,
        activation=algo.activation,
        normalize=algo.normalize_observations,
        init_std=algo.init_std,
        squash=cfg.env.action_mode == "squash",
    )


def make_critic(
    cfg: Any, env: EnvBase, *, groups: Sequence[str] | None = None, num_values: int = 1
) -> TensorDictModule:
    """The value network that ``cfg.algorithm`` describes, beside ``make_policy``.

    Args:
        cfg: a configuration whose ``algorithm`` has the critic's groups, widths, activation and normalization.
        env: the environment whose observations it is for.
        groups: what it reads where ``cfg.algorithm.critic_groups`` names nothing. Default: every group.
        num_values: values that it estimates.

    Examples:
        >>> from types import SimpleNamespace
        >>> from edenrl.config import PPOConfig
        >>> cfg = SimpleNamespace(algorithm=PPOConfig(critic_hidden=(8,)))
        >>> make_critic(cfg, make_env("PointMass", 2)).out_keys
        ['state_value']
    """
    algo = cfg.algorithm
    return value_critic(
        observation_groups(env.observation_spec, algo.critic_groups or groups),
        num_values=num_values,
        hidden=algo.critic_hidden,
        activation=algo.activation,
        normalize=algo.normalize_observations,
    )


def symmetry_mirrors(cfg: Any, env: EnvBase, use: bool | str = True) -> dict[str, Any] | None:
    """The mirrors that an environment publishes, or None where ``cfg.algorithm.symmetry`` asks for something else.

    Args:
        cfg: a configuration whose ``algorithm`` has ``symmetry``.
        env: the environment; without mirrors the result is empty, and what needs them refuses it.
        use: the value of ``symmetry`` that asks for them.

    Examples:
        >>> from types import SimpleNamespace
        >>> cfg = SimpleNamespace(algorithm=SimpleNamespace(symmetry=False))
        >>> symmetry_mirrors(cfg, make_env("PointMass", 2)) is None
        True
    """
    if cfg.algorithm.symmetry != use:
        return None
    return dict(getattr(env, "mirrors", {}))


def _build(env: EnvConfig, num_envs: int, device: torch.device | str, seed: int) -> EnvBase:
    options = dict(env.kwargs)
    if env.vectorization != "sync":
        options["vectorization"] = env.vectorization
    return make_env(env.name, num_envs, device, seed, **options)


def _with_box(env: EnvBase, scale: float | None) -> EnvBase:
    return env if scale is None else bound_actions(env, scale)


def _worker_env(env: EnvConfig, scale: float | None, num_envs: int, seed: int, worker: int) -> EnvBase:
    built = _with_box(_build(env, num_envs, "cpu", spawn_seeds(seed, worker + 1)[worker]), scale)
    return wrap_env(built, reward_scale=env.reward_scale, **env.action_options())


def collector_options(cfg: RunConfig) -> dict[str, Any]:
    """Keyword arguments of ``edenrl.collectors.make_collector`` that choose ``cfg.collector`` and its workers.

    Examples:
        >>> collector_options(RunConfig())["kind"]
        'single'
    """
    rows = cfg.env.num_envs // cfg.num_workers
    return {
        "kind": cfg.collector,
        "num_workers": cfg.num_workers,
        "worker_env": partial(_worker_env, cfg.env, cfg.action_bound_scale, rows, cfg.seed),
        "seed": cfg.seed,
    }


def append_primers(env: TransformedEnv, policy: nn.Module) -> TransformedEnv:
    """Appends the transforms that a recurrent policy needs (``make_tensordict_primer``), and returns `env`.

    Examples:
        >>> from edenrl.modules import gaussian_actor
        >>> env = wrap_env(make_env("PointMass", 2))
        >>> append_primers(env, gaussian_actor({"observation": 14}, 2)) is env  # it has no state
        True
    """
    primers = get_primers_from_module(policy, warn=False)
    return env if primers is None else env.append_transform(primers)


def evaluate_run(
    cfg: RunConfig,
    policy: TensorDictModuleBase,
    device: torch.device | str = "cpu",
    *,
    num_episodes: int | None = None,
    seed: int | None = None,
    on_step: OnStep | None = None,
) -> dict[str, float]:
    """Evaluates a policy as ``cfg.evaluation`` says, on unscaled rewards; see ``edenrl.training.evaluate``."""
    env = cfg.env.model_copy(update={"kwargs": {**cfg.env.kwargs, **cfg.evaluation.kwargs}})
    seed = cfg.evaluation.seed if seed is None else seed

    def make(rows: int) -> EnvBase:
        built = _with_box(_build(env, rows, device, seed), cfg.action_bound_scale)
        return append_primers(wrap_env(built, **env.action_options()), policy)

    episodes = cfg.evaluation.num_episodes if num_episodes is None else num_episodes
    return evaluate(policy, make, episodes, on_step=on_step)
