"""What collectors save of an environment, and how they continue from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

__all__ = ["env_state_dict", "load_env_state_dict", "load_step", "simulator_of"]

_log = logging.getLogger("edenrl")


def simulator_of(env: EnvBase) -> EnvBase:
    """The innermost environment, inside of all transforms."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def env_state_dict(env: EnvBase) -> dict[str, Any]:
    """The state of the transforms and of the simulator."""
    return {
        "transforms": env.transform.state_dict() if isinstance(env, TransformedEnv) else {},
        "simulator": simulator_of(env).state_dict(),
    }


def load_env_state_dict(env: EnvBase, state: Mapping[str, Any], *, warn: bool = True) -> bool:
    """Restores what ``env_state_dict`` returned, found among the entries of ``state``.

    Args:
        env: the environment.
        state: the saved state of a collector.
        warn: whether to log that episodes start anew, where they do.

    Returns:
        Whether the episodes continue. They start anew if the simulator saved no ``"_extra_state"``, or one that it
        marks as not exact.
    """
    if isinstance(env, TransformedEnv):
        env.transform.load_state_dict(state["transforms"])
    simulator, saved = simulator_of(env), state["simulator"]
    simulator.load_state_dict(saved)
    extra = saved.get("_extra_state")
    if extra is None and warn:  # with an inexact one the environment itself has warned
        _log.warning("%s does not save its simulation state: episodes start anew.", type(simulator).__name__)
    return extra is not None and extra.get("exact", True)


def load_step(saved: Mapping[str, Any], current: TensorDictBase) -> TensorDictBase:
    """The saved step that the next one continues, with the batch size and on the device of the current one.

    Steps that an earlier version saved have no ``late_start``; no episode of theirs was shortened.
    """
    step = TensorDict.from_dict(dict(saved), batch_size=current.batch_size)
    step = step if current.device is None else step.to(current.device)
    if "late_start" in current.keys() and "late_start" not in step.keys():
        step["late_start"] = torch.zeros_like(current["late_start"])
    return step
