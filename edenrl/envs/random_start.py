"""Training that begins in the middle of episodes, so that not all of them reach their time limit in the same step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.transforms import Transform

from edenrl.envs.seeds import checked_seed

__all__ = ["ClockedEnv", "RandomStart", "SimulatorClock", "can_start_late"]

# A random stream of its own, apart from those of the environments that have the same seed.
_STREAM = (1,)


@runtime_checkable
class ClockedEnv(Protocol):
    """An environment whose running episodes can be told how many steps they have taken.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> isinstance(PointMass(1), ClockedEnv)
        True
    """

    @property
    def max_steps(self) -> int | Tensor | None:
        """Steps after which an episode is truncated, for all or ``[N]``; None: the clock cannot be set."""

    def set_episode_steps(self, steps: Tensor) -> None:
        """Set the steps that the running episodes have taken, ``[N]``. Nothing else of their state changes."""


class SimulatorClock:
    """The clock of a wrapped simulator, for adapters: ``episode_length_buf`` and ``max_episode_length``.

    Vector environments in the style of rsl_rl, Isaac Lab and mjlab have them, or their ``unwrapped`` has.
    """

    def _simulator(self) -> Any:
        """The wrapped simulator."""
        raise NotImplementedError

    def _clock_owner(self) -> Any:
        simulator = self._simulator()
        return next((owner for owner in (simulator, getattr(simulator, "unwrapped", None)) if _has_clock(owner)), None)

    @property
    def max_steps(self) -> int | Tensor | None:
        """The simulator's time limit in steps; None where its clock cannot be set."""
        owner = self._clock_owner()
        return None if owner is None else owner.max_episode_length

    def set_episode_steps(self, steps: Tensor) -> None:
        """Set the steps that the running episodes have taken.

        Args:
            steps: ``[N]``.

        Raises:
            TypeError: the simulator has no ``episode_length_buf`` that can be set.
        """
        owner = self._clock_owner()
        if owner is None:
            name = type(self._simulator()).__name__
            raise TypeError(f"{name} has no episode_length_buf that can be set, with a max_episode_length.")
        owner.episode_length_buf = steps.to(owner.episode_length_buf)


def _has_clock(owner: Any) -> bool:
    # Looked up without __getattr__: what a wrapper passes on when it is read, it does not pass on when it is set.
    declared = inspect.getattr_static(owner, "episode_length_buf", None)
    settable = declared.fset is not None if isinstance(declared, property) else isinstance(declared, Tensor)
    return settable and getattr(owner, "max_episode_length", None) is not None


def can_start_late(env: EnvBase) -> bool:
    """Whether episodes of an environment can start with steps on their clock.

    That needs a ``ClockedEnv`` inside of all transforms, or TorchRL's ``StepCounter`` with ``max_steps`` among them.

    Args:
        env: the environment, transformed or not.

    Examples:
        >>> from edenrl.envs import PointMass, make_env
        >>> can_start_late(PointMass(2)), can_start_late(make_env("Pendulum-v1", 2))
        (True, False)
    """
    counters, simulator = _clocks(env)
    return bool(counters) or simulator is not None


def _clocks(env: EnvBase) -> tuple[list[StepCounter], Any]:
    """The step counters with a limit around an environment, and the environment inside if its clock can be set."""
    counters: list[StepCounter] = []
    while isinstance(env, TransformedEnv):
        found = [transform for transform in env.transform.modules() if isinstance(transform, StepCounter)]
        counters += [counter for counter in found if counter.max_steps is not None]
        env = env.base_env
    # Of the class: TorchRL's batches of environments pass on questions about their instances.
    clocked = hasattr(type(env), "set_episode_steps") and getattr(env, "max_steps", None) is not None
    return counters, env if clocked else None


class RandomStart(Transform):
    """Starts each first episode at a random step of its clock, uniform in [0, time limit).

    Without it, environments that start together all time out in the same step, again and again. A batch of a few steps
    then holds all ends of episodes or none. Only the count of steps changes, not the state that an episode starts in.
    A shortened episode ends by an ordinary time-out.

    ``("next", "late_start")`` ``[N, 1]`` marks the steps of episodes that were shortened, so that statistics of whole
    episodes can leave them out. The clocks are set in full resets before the first step. Later resets start episodes
    at step 0.

    Args:
        seed: of the random steps. Equal seeds give equal steps.
        begun: the environment has already begun its first episodes, as in a resumed run: no clock is set.

    Raises:
        ValueError: (in the first reset) for an environment without a clock that can be set, see ``can_start_late``.

    Source: the option ``init_at_random_ep_len`` of rsl_rl's runner.

    Examples:
        >>> from edenrl.envs import PointMass, RandomStart
        >>> from torchrl.envs import TransformedEnv
        >>> env = TransformedEnv(PointMass(4, seed=0, max_steps=8), RandomStart(seed=0))
        >>> data = env.rollout(8, break_when_any_done=False)
        >>> data["next", "truncated"].squeeze(-1).int().argmax(1) + 1  # the steps that the first episodes had left
        tensor([3, 7, 4, 5])
        >>> data["next", "late_start"].squeeze(-1).sum(1)
        tensor([3, 7, 4, 5])
    """

    def __init__(self, seed: int, *, begun: bool = False) -> None:
        super().__init__()
        self.seed, self.begun = checked_seed(seed), begun
        self._late: Tensor | None = None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.begun = True
        return next_tensordict.set("late_start", self._late_rows(next_tensordict.get("done")).clone())

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        assert self.parent is not None
        none = self.parent.full_done_spec["done"].zero()
        mask = tensordict.get("_reset", None)
        rows = ~none if mask is None else mask.reshape(none.shape)
        if not self.begun and bool(rows.all()):
            self._late = self._set_clocks(tensordict_reset).reshape(none.shape)
        else:
            self._late = self._late_rows(none) & ~rows
        return tensordict_reset.set("late_start", self._late.clone())

    def _late_rows(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like) if self._late is None else self._late.to(like.device)

    def _set_clocks(self, tensordict_reset: TensorDictBase) -> Tensor:
        """Draws the steps and sets every clock; returns the rows that do not start at step 0."""
        assert self.parent is not None
        counters, simulator = _clocks(self.parent)
        limits = [counter.max_steps for counter in counters]
        limits += [] if simulator is None else [simulator.max_steps]
        if not limits:
            raise ValueError("RandomStart was given an environment without a clock that can be set.")
        (num_envs,) = self.parent.batch_size
        lowest = torch.full((num_envs,), torch.inf, dtype=torch.float64)
        for limit in limits:
            lowest = lowest.minimum(torch.as_tensor(limit).to("cpu", torch.float64))
        drawn = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=_STREAM)).random(num_envs)
        steps = (torch.from_numpy(drawn) * lowest).long().to(self.parent.device or "cpu")
        for counter in counters:
            for key in counter.step_count_keys:
                count = tensordict_reset.get(key)
                tensordict_reset.set(key, steps.to(count).reshape(count.shape))
        if simulator is not None:
            simulator.set_episode_steps(steps)
        return steps > 0

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the mark."""
        shape = (*observation_spec.shape, 1)
        observation_spec["late_start"] = Binary(1, shape, device=observation_spec.device, dtype=torch.bool)
        return observation_spec

    def get_extra_state(self) -> dict[str, Any]:
        """Whether training has begun, and the rows in shortened episodes; for ``state_dict()``."""
        return {"begun": self.begun, "late": None if self._late is None else self._late.clone()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``get_extra_state`` returned."""
        self.begun, self._late = state["begun"], state["late"]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints from before this transform existed have no such entry: all their episodes started at step 0.
        if f"{prefix}_extra_state" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args)
