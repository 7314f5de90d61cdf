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
from edenrl.envs import (
    RandomStart,
    action_box,
    bound_actions,
    can_start_late,
    make_env,
    process_seed,
    spawn_seeds,
    wrap_env,
)
from edenrl.modules import check_mirror_widths, make_actor, observation_groups, value_critic
from edenrl.training.checkpoint_folder import has_checkpoint
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
    "declared_mirrors",
    "is_new",
    "training_env",
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
    return _mirrors(env) if cfg.algorithm.symmetry == use else None


def declared_mirrors(cfg: Any, env: EnvBase, switch: str, groups: Sequence[str]) -> dict[str, Any] | None:
    """The mirrors that an environment publishes, or None where a switch of ``cfg.algorithm`` says no.

    Args:
        cfg: a configuration whose ``algorithm`` has the switch: true, false, or None for "where there are mirrors".
        env: the environment.
        switch: name of the switch.
        groups: observation groups that need mirrors, besides the action.

    Raises:
        ValueError: the switch is true, and a mirror is missing; or one has another width than its entry.

    Examples:
        >>> from types import SimpleNamespace
        >>> cfg = SimpleNamespace(algorithm=SimpleNamespace(mirror_data=None))
        >>> declared_mirrors(cfg, make_env("PointMass", 2), "mirror_data", ["observation"]) is None
        True
    """
    wanted: bool | None = getattr(cfg.algorithm, switch)
    mirrors = _mirrors(env)
    missing = [key for key in (*groups, "action") if key not in mirrors]
    if wanted and missing:
        raise ValueError(
            f"algorithm.{switch} needs a mirror for {missing}; {cfg.env.name} declares them for "
            f"{sorted(mirrors) or 'nothing'}. Declare them as env.mirrors, or set {switch} to false."
        )
    return None if missing or wanted is False else mirrors


def _mirrors(env: EnvBase) -> dict[str, Any]:
    """What an environment publishes as ``mirrors``, as wide as its observations and actions."""
    mirrors = dict(getattr(env, "mirrors", {}))
    specs = {**dict(env.observation_spec.items(True, True)), "action": env.action_spec}
    check_mirror_widths(mirrors, {key: spec.shape[-1] for key, spec in specs.items() if spec.shape})
    return mirrors


def _build(env: EnvConfig, num_envs: int, device: torch.device | str, seed: int) -> EnvBase:
    options = dict(env.kwargs)
    if env.vectorization != "sync":
        options["vectorization"] = env.vectorization
    return make_env(env.name, num_envs, device, seed, **options)


def _with_box(env: EnvBase, scale: float | None) -> EnvBase:
    return env if scale is None else bound_actions(env, scale)


def is_new(cfg: RunConfig) -> bool:
    """Whether a run starts from the beginning: there is no checkpoint to continue from.

    Examples:
        >>> is_new(RunConfig())
        True
    """
    return cfg.resume is None or not has_checkpoint(cfg.resume)


def training_env(cfg: RunConfig, env: EnvBase, seed: int) -> TransformedEnv:
    """The environment as a learner sees it: see ``wrap_env``, and ``RandomStart`` where ``cfg`` asks for it.

    Args:
        cfg: the configuration.
        env: from ``build_env``.
        seed: of the steps at which first episodes start.

    Raises:
        ValueError: ``cfg.env.random_start`` is true, and the environment has no clock that can be set.

    Examples:
        >>> env = training_env(RunConfig(), make_env("PointMass", 2), seed=0)
        >>> "late_start" in env.observation_spec.keys()
        True
    """
    return _learner_env(_env_config(cfg), is_new(cfg), env, seed)


def _env_config(cfg: RunConfig) -> EnvConfig:
    """The configuration of the environment, with the algorithm's say in it."""
    return cfg.env.model_copy(update={"random_start": cfg.random_start})


def _learner_env(cfg: EnvConfig, new: bool, env: EnvBase, seed: int) -> TransformedEnv:
    wrapped = wrap_env(env, reward_scale=cfg.reward_scale, **cfg.action_options())
    if cfg.random_start is False:
        return wrapped
    if can_start_late(wrapped):
        # Last, so that the transforms before it keep their places in checkpoints.
        return wrapped.append_transform(RandomStart(seed, begun=not new))
    if cfg.random_start:
        raise ValueError(
            f"{cfg.name} cannot start at random steps of its episodes (--env.random_start true): it has no time limit "
            "whose clock can be set. Leave random_start out, or give the environment max_steps and a method "
            "set_episode_steps(steps)."
        )
    return wrapped


def _worker_env(env: EnvConfig, new: bool, scale: float | None, num_envs: int, seed: int, worker: int) -> EnvBase:
    own = spawn_seeds(seed, worker + 1)[worker]
    return _learner_env(env, new, _with_box(_build(env, num_envs, "cpu", own), scale), own)


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
        "worker_env": partial(_worker_env, _env_config(cfg), is_new(cfg), cfg.action_bound_scale, rows, cfg.seed),
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
