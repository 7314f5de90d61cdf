"""Environments whose whole state is a dictionary of tensors: batched, differentiable, and resumable bit for bit."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from edenrl.envs.groups import SameStateGroups, repeat_in_groups
from edenrl.envs.seeds import chosen_seed

__all__ = ["TensorStateEnv"]


class TensorStateEnv(SameStateGroups, EnvBase):
    """Base of the built-in tasks: partial reset, groups in one state, cutting the graph, seeding, exact resumption.

    A task writes four methods. ``_make_specs`` calls ``_set_specs``. ``_draw_state`` gives the first state of an
    episode for every row; the state has an entry ``steps``. ``_observe`` returns the observations through ``_pack``.
    ``_step`` replaces ``self._state`` and returns ``_observe()`` with the reward. Every state tensor has shape
    ``[N, ...]``. Nothing here waits for the device.

    Reward and next observation keep the autograd path to every action since the last reset of the row or the last
    ``detach_state``; a row that is reset starts without gradient.

    Args:
        num_envs: Number of environments ``N``, at least 1.
        device: Device of the states and of the random generator. Default: CPU.
        max_steps: Steps until truncation, at least 1.
        seed: Seed of the environment's own generator. Default: drawn from torch's global generator, so that
            ``torch.manual_seed`` makes a run repeatable.
        dtype: Floating-point type of every entry. Default: ``torch.get_default_dtype()``.

    Raises:
        ValueError: ``num_envs`` or ``max_steps`` is not a whole number of at least 1, or ``dtype`` not a floating-point
            type.

    Examples:
        >>> import torch
        >>> from edenrl.envs import CartPoleSwingUp
        >>> env = CartPoleSwingUp(2, seed=0)
        >>> saved = env.state_dict()
        >>> first = env.reset()["observation"]
        >>> _ = env.load_state_dict(saved)
        >>> bool((env.reset()["observation"] == first).all())
        True
    """

    returns_fresh_tensors = True
    _state: dict[str, Tensor]

    def __init__(
        self,
        num_envs: int,
        *,
        device: torch.device | str | None = None,
        max_steps: int,
        seed: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        task = type(self).__name__
        for name, value in (("num_envs", num_envs), ("max_steps", max_steps)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} was given to {task}; expected a whole number, at least 1.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype={dtype!r} was given to {task}; expected a floating-point torch.dtype or None.")
        super().__init__(device=torch.device("cpu" if device is None else device), batch_size=[num_envs])
        self.num_envs = num_envs
        self.max_steps = max_steps
        self._float = torch.get_default_dtype() if dtype is None else dtype
        self._make_specs()
        self._generator = torch.Generator(device=self.device)
        self._state = self._draw_state()
        # Drawing above consumed numbers: seeding afterwards makes `Task(seed=s)` and `set_seed(s)` agree.
        self._set_seed(seed)

    @abc.abstractmethod
    def _make_specs(self) -> None:
        """Set all specs, with ``_set_specs``."""

    @abc.abstractmethod
    def _draw_state(self) -> dict[str, Tensor]:
        """Draw the first state of an episode for every row."""

    @abc.abstractmethod
    def _observe(self) -> TensorDict:
        """The observations of the current state, as fresh tensors and with done flags; made by ``_pack``."""

    def _set_specs(self, num_actions: int, **entries: int | Sequence[str]) -> None:
        """Set the specs of a task whose actions lie in [-1, 1].

        Args:
            num_actions: width of the action.
            entries: observations by key: a width ``d`` for ``[N, d]``, or the names of entries ``[N, 1]`` below it.
        """
        shape, specs = self.batch_size, {}
        for key, entry in entries.items():
            if isinstance(entry, int):
                specs[key] = self._columns(entry)
            else:
                columns = {name: self._columns() for name in entry}
                specs[key] = Composite(columns, shape=shape, device=self.device)
        self.observation_spec = Composite(specs, shape=shape, device=self.device)
        self.action_spec = Bounded(-1.0, 1.0, (*shape, num_actions), device=self.device, dtype=self._float)
        self.reward_spec = self._columns()
        self.done_spec = self._done_flags()

    def _pack(self, entries: Mapping[str, Tensor | dict[str, Tensor]], terminated: Tensor | None = None) -> TensorDict:
        """Observations and done flags; a row is truncated after ``max_steps`` steps.

        Args:
            entries: fresh tensors by key, nested ones as dictionaries.
            terminated: flags ``[N, 1]``. Default: no row terminates.
        """
        truncated = self._state["steps"] >= self.max_steps
        terminated = torch.zeros_like(truncated) if terminated is None else terminated.clone()
        flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
        return TensorDict({**entries, **flags}, batch_size=self.batch_size, device=self.device)

    def _zero_steps(self) -> Tensor:
        """The entry ``steps`` of a first state, ``[N, 1]``."""
        return torch.zeros(self.num_envs, 1, dtype=torch.int64, device=self.device)

    def _columns(self, width: int = 1) -> Unbounded:
        """Spec of ``[N, width]`` numbers."""
        return Unbounded((*self.batch_size, width), device=self.device, dtype=self._float)

    def _done_flags(self) -> Composite:
        """Spec of the three done flags, ``[N, 1]`` each."""
        shape = self.batch_size
        flags = {
            name: Binary(1, shape=(*shape, 1), device=self.device, dtype=torch.bool)
            for name in ("done", "terminated", "truncated")
        }
        return Composite(flags, shape=shape, device=self.device)

    def _set_seed(self, seed: int | None) -> None:
        self._generator.manual_seed(chosen_seed(seed))

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        unit = torch.rand(self.num_envs, *shape, generator=self._generator, device=self.device, dtype=self._float)
        return low + (high - low) * unit

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDict:
        fresh = self._draw_state()
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            self._state = repeat_in_groups(fresh, self.group_size)
        else:
            rows = mask.reshape(self.num_envs, 1)
            self._state = {
                name: torch.where(rows.reshape(-1, *[1] * (new.dim() - 1)), new, self._state[name])
                for name, new in fresh.items()
            }
        return self._observe()

    def set_episode_steps(self, steps: Tensor) -> None:
        """Set the steps that the running episodes have taken; nothing else of their state changes.

        Args:
            steps: ``[N]``, each less than ``max_steps``.
        """
        self._state = {**self._state, "steps": steps.to(self._state["steps"]).reshape(self.num_envs, 1).clone()}

    def detach_state(self) -> TensorDict:
        """Cut the autograd graph at the current state.

        The next steps continue from the same numbers, but no gradient reaches an action taken before this call.
        Nothing is reset or drawn.

        Returns:
            The current root TensorDict, as ``reset`` gives it.
        """
        # A clone, not a bare detach: a state computed in inference mode could not enter autograd otherwise.
        self._state = {name: value.detach().clone() for name, value in self._state.items()}
        return self._observe()

    def get_extra_state(self) -> dict[str, Any]:
        """Return everything needed to continue bit for bit: state tensors and the generator's state.

        It is stored by ``state_dict()`` under ``"_extra_state"``.
        """
        state = {name: value.detach().clone() for name, value in self._state.items()}
        return {"state": state, "generator": self._generator.get_state()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``get_extra_state`` returned.

        Args:
            state: The saved mapping.

        Raises:
            ValueError: the state belongs to another number of environments or another version of the task.
        """
        saved: Mapping[str, Tensor] = state["state"]
        found = {name: tuple(value.shape) for name, value in saved.items()}
        expected = {name: tuple(value.shape) for name, value in self._state.items()}
        if found != expected:
            raise ValueError(
                f"{type(self).__name__} state has entries {found}; expected {expected} for num_envs={self.num_envs}. "
                "Build the environment with the num_envs of the saved run."
            )
        self._state = {
            name: value.to(device=self.device, dtype=self._state[name].dtype, copy=True)
            for name, value in saved.items()
        }
        self._generator.set_state(state["generator"].cpu())

    def to(self, device: torch.device | str | int) -> TensorStateEnv:
        """Move specs and state to ``device``; the generator is replaced there by one seeded from the old one."""
        before = self.device
        super().to(device)
        if self.device != before:
            seed = int(torch.randint(2**31 - 1, (), generator=self._generator, device=before).item())
            self._state = {name: value.to(self.device) for name, value in self._state.items()}
            self._generator = torch.Generator(device=self.device).manual_seed(seed)
        return self
