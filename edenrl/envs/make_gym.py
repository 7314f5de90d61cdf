"""Gymnasium environments by id or class, as vectors that leave resets to TorchRL."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from edenrl.envs.gym import GymVectorEnv
from edenrl.envs.seeds import chosen_seed

__all__ = ["make_gym_env"]

_logger = logging.getLogger(__name__)


def make_gym_env(
    env_id: str | Callable[..., gymnasium.Env],
    num_envs: int,
    *,
    vectorization: Literal["sync", "async"] = "sync",
    device: torch.device | str | None = None,
    seed: int | None = None,
    **env_kwargs: Any,
) -> GymVectorEnv:
    """Build ``num_envs`` copies of a Gymnasium environment as one ``GymVectorEnv``.

    Args:
        env_id: Gymnasium id, such as ``"HalfCheetah-v5"`` or ``"my_robots:Reacher-v0"``, or a class or function that
            returns one environment.
        num_envs: Number of copies, at least 1.
        vectorization: ``"sync"`` steps them in this process, which is fastest for cheap environments and can be resumed
            exactly; ``"async"`` gives each its own process. Default ``"sync"``.
        device: Device of the returned tensors. Default: CPU.
        seed: Seed from which every copy gets its own, see ``edenrl.envs.spawn_seeds``. Default: drawn from torch's
            global generator, so that ``torch.manual_seed`` makes a run repeatable.
        env_kwargs: Passed to ``gymnasium.make``: arguments of the environment, and Gymnasium's own, such as
            ``max_episode_steps``.

    Returns:
        The environment, batch size ``[num_envs]``.

    Raises:
        ValueError: ``num_envs`` below 1, or an unknown ``vectorization``.
        ImportError: the environment needs ``mujoco`` and it is not installed.

    Examples:
        >>> from edenrl.envs import make_gym_env
        >>> env = make_gym_env("Pendulum-v1", 2, seed=0, g=9.0)
        >>> env.batch_size, env.action_spec.space.high.tolist()
        (torch.Size([2]), [[2.0], [2.0]])
    """
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} was given for {env_id!r}; expected at least 1.")
    if vectorization not in ("sync", "async"):
        raise ValueError(f"vectorization={vectorization!r} was given; expected 'sync' or 'async'.")
    what: str | EnvSpec
    if isinstance(env_id, str):
        module, _, registered = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        what, entry_point = env_id, gymnasium.spec(registered).entry_point
    else:
        # Unregistered, and yet with what `gymnasium.make` adds: time limits and checks.
        name = getattr(env_id, "__name__", type(env_id).__name__).strip("<>")
        what, entry_point = EnvSpec(name, entry_point=env_id), env_id
    needs_mujoco = "mujoco" in str(entry_point)
    if needs_mujoco and importlib.util.find_spec("mujoco") is None:
        raise ImportError(f'{env_id} needs the mujoco package, which is not installed: pip install "edenrl[mujoco]"')
    copies: list[Callable[[], gymnasium.Env]] = [
        functools.partial(_make_one, what, needs_mujoco, env_kwargs, os.getpid()) for _ in range(num_envs)
    ]
    vector: VectorEnv
    if vectorization == "sync":
        # copy=False: GymVectorEnv copies every array into a tensor anyway.
        vector = _QuietSyncVectorEnv(copies, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    else:
        vector = AsyncVectorEnv(copies, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    env = GymVectorEnv(vector, device=device)
    env.set_seed(chosen_seed(seed))
    return env


class _QuietSyncVectorEnv(SyncVectorEnv):
    """A ``SyncVectorEnv`` that does not merge infos: nobody reads them, and merging costs up to a tenth of a step."""

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        return vector_infos


def _make_one(env_id: str | EnvSpec, uses_mujoco: bool, kwargs: dict[str, Any], owner: int) -> gymnasium.Env:
    if os.getpid() != owner:
        # A terminal sends Ctrl-C to every process of a run; its owner decides when this one ends.
        # Gymnasium ends it with SIGTERM. A separate process group keeps SIGTERM away that is sent to the whole run.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
    if not uses_mujoco:
        return gymnasium.make(env_id, **kwargs)
    with _without_mass_warning():
        return gymnasium.make(env_id, **kwargs)


@contextmanager
def _without_mass_warning() -> Iterator[None]:
    """Drop MuJoCo's warning about ``settotalmass``, an attribute of Gymnasium's own model files.

    MuJoCo would print it for every copy and append it to a file in the working directory. Other warnings are logged.
    """
    import mujoco

    def report(message: str | bytes) -> None:
        text = message.decode() if isinstance(message, bytes) else message
        if "settotalmass" not in text:
            _logger.warning("mujoco: %s", text)

    previous = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(report)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(previous)
