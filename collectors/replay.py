"""Replay that stores every observation once and answers with n-step transitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.envs import Transform

from edenrl._files import disk_space
from edenrl.collectors.episode_ends import EpisodeEnds, key_name, named_key
from edenrl.collectors.n_step import n_step_windows
from edenrl.collectors.reward_normalizer import RewardNormalizer
from edenrl.collectors.storage_space import own_folder, require_space, reserve, unannounced
from edenrl.collectors.stored_steps import (
    REWARD,
    TERMINATED,
    TRUNCATED,
    in_precision,
    observations_differ,
    select_steps,
    truncate_breaks,
)
from edenrl.modules import refuse_nonfinite, several_processes

__all__ = ["NStepReplayBuffer"]

# Options of TorchRL's class that have no meaning here, because this buffer does without the parts that they choose.
_FIXED = {"storage", "sampler", "writer", "collate_fn", "priority_key", "dim_extend", "delayed_init"}


class NStepReplayBuffer(TensorDictReplayBuffer):
    """TorchRL's replay buffer in about half the memory, sampling n-step transitions.

    ``extend`` takes what a collector yields, ``[N, T]`` in time order, the same N environments each time. The buffer
    keeps observations, action, reward, ``terminated`` and ``truncated``. The next observation of a step is stored once,
    as the observation of the following step. Only the last observations of episodes are stored separately. If the next
    observation of a step differs from the observation of the following step, because the collector was reset in the
    middle of an episode, the step counts as truncated.

    ``sample`` draws uniformly, with replacement, from all steps whose window of ``n_steps`` is complete. The window
    ends early at the end of an episode. A sample ``[batch_size]`` holds the observations and the action of its first
    step. Under ``"next"`` it holds the discounted sum of rewards over the window, and the true observation, ``done``,
    ``terminated`` and ``truncated`` at its end. ``steps_to_next_obs`` ``[batch_size, 1]`` is the length k of the
    window: bootstrap with ``gamma ** k``. TorchRL's losses find that entry by its name and do so.

    Args:
        max_size: capacity in steps of single environments; rounded up to a multiple of their number.
        n_steps: steps per window.
        gamma: discount of the rewards in a window.
        batch_size: default number of samples.
        observations: keys of the observations, others are not stored; default ``["observation"]``.
        action_key: key of the action.
        observation_dtype: store observations in this floating-point type, such as ``torch.bfloat16``; they are sampled
            in the type they came in.
        device: where the data lies and samples come from.
        memmap: directory to keep the data in, on disk instead of in memory. Buffers, also those of several processes,
            may share it: each takes a folder inside that no other living buffer uses.
        transform: TorchRL transforms, inverse on ``extend``, forward on samples.
        save_data: whether ``state_dict`` holds the data. Without it a restored buffer starts empty.
        kwargs: further options of TorchRL's class, such as ``prefetch`` or ``generator``.

    Raises:
        ValueError: for a setting out of range, data that is not ``[N, T]`` or has another N, observations that do not
            fit ``observation_dtype``, entries that are NaN, infinite or beyond 1e18, or a buffer that does not fit the
            free memory (or disk). The latter is checked before allocation; the message gives the number of bytes.
        RuntimeError: for sampling before a window is complete.
        TypeError: for a sampler, storage or writer of one's own.

    Examples:
        >>> from edenrl.collectors import Collector
        >>> from edenrl.envs import make_env
        >>> buffer = NStepReplayBuffer(1000, n_steps=3, gamma=0.9, batch_size=32)
        >>> for rollout in Collector(make_env("PointMass", 4, seed=0), None, frames_per_batch=40, total_frames=80):
        ...     _ = buffer.extend(rollout)
        >>> batch = buffer.sample()
        >>> len(buffer), batch["observation"].shape, int(batch["steps_to_next_obs"].max())
        (80, torch.Size([32, 14]), 3)
    """

    def __init__(
        self,
        max_size: int,
        *,
        n_steps: int = 1,
        gamma: float = 0.99,
        batch_size: int | None = None,
        observations: Sequence[NestedKey] = ("observation",),
        action_key: NestedKey = "action",
        observation_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        memmap: str | Path | None = None,
        transform: Transform | None = None,
        save_data: bool = True,
        **kwargs: Any,
    ) -> None:
        if max_size < 1 or n_steps < 1 or not 0 < gamma <= 1:
            raise ValueError(
                f"NStepReplayBuffer needs max_size >= 1, n_steps >= 1 and gamma in (0, 1], got {max_size}, {n_steps} "
                f"and {gamma}."
            )
        if observation_dtype is not None and not observation_dtype.is_floating_point:
            raise ValueError(f"observation_dtype must be a floating-point type, got {observation_dtype}.")
        if memmap is not None and torch.device(device).type != "cpu":
            raise ValueError(f"memmap needs device 'cpu', got {str(device)!r}. Move the samples to the device instead.")
        if refused := sorted(_FIXED & kwargs.keys()):
            raise TypeError(f"NStepReplayBuffer stores and draws steps in its own way; leave {refused} out.")
        self.n_steps, self.gamma, self.memmap, self.save_data = n_steps, gamma, memmap, save_data
        self.observations, self.action_key = [unravel_key(key) for key in observations], unravel_key(action_key)
        self.observation_dtype, self.device = observation_dtype, torch.device(device)
        self._ends = EpisodeEnds()
        self._written = 0
        self._dtypes: dict[Any, torch.dtype] = {}
        self._last: TensorDictBase | None = None
        storage: LazyTensorStorage
        if memmap is None:
            storage = LazyTensorStorage(max_size, ndim=2, device=device)
        else:
            folder = own_folder(self, Path(memmap))
            storage = LazyMemmapStorage(max_size, ndim=2, scratch_dir=str(folder), existsok=True)
        # Not TensorDictRoundRobinWriter, which would store every index beside the data.
        super().__init__(
            storage=storage,
            writer=RoundRobinWriter(),
            batch_size=batch_size,
            transform=transform,
            dim_extend=0,
            **kwargs,
        )

    def extend(self, tensordicts: TensorDictBase, *, update_priority: bool | None = None) -> Tensor:
        """Adds the next steps of all environments, ``[N, T]``; returns where they went."""
        if tensordicts.batch_dims != 2:
            raise ValueError(
                f"NStepReplayBuffer takes data [environments, steps] as collectors yield it, got the batch size "
                f"{tuple(tensordicts.batch_size)}."
            )
        if self._last is not None and len(tensordicts) != len(self._last):
            raise ValueError(
                f"NStepReplayBuffer holds steps of {len(self._last)} environments, got {len(tensordicts)} rows. Keep "
                "the number of environments, or use one buffer for each collector."
            )
        after = [("next", key) for key in self.observations]
        keys = [*self.observations, self.action_key, *map(unravel_key, after), REWARD]
        refuse_nonfinite(tensordicts, keys, time_axis=1)  # before anything is stored
        with self._replay_lock:  # with prefetch, samples are drawn in another thread
            return self._extend_rows(tensordicts)

    def _extend_rows(self, tensordicts: TensorDictBase) -> Tensor:
        """Stores the steps, time first, and beside them the observations after which an episode ended."""
        data = select_steps(tensordicts, self.observations, self.action_key).to(self.device)
        after = data["next"].select(*self.observations)  # the observation after each step, in full precision
        truncate_breaks(data, after)
        if self._last is not None:
            self._truncate_stored(self._last, data[:, 0])
        stored = data.exclude(*[("next", key) for key in self.observations]).transpose(0, 1).contiguous()
        for key in self.observations:
            self._dtypes[key] = stored.get(key).dtype
            stored.set(key, self._reduced(stored.get(key), key))
        capacity = self._steps_per_env(stored.shape[1])
        if capacity <= self.n_steps or len(stored) > capacity:
            raise ValueError(
                f"max_size={self._storage.max_size} leaves {capacity} steps for each of {stored.shape[1]} "
                f"environments; it must be more than n_steps={self.n_steps} and hold a batch of {len(stored)}. Raise "
                "max_size."
            )
        if not self._storage.initialized:
            self._allocate(stored)
        ended = (stored[TERMINATED] | stored[TRUNCATED]).squeeze(-1)
        finals = {key: self._reduced(after.get(key).transpose(0, 1)[ended], key) for key in self.observations}
        steps, rows = ended.nonzero().unbind(-1)
        index = super().extend(stored)
        self._ends.add((self._written + steps) * ended.shape[1] + rows, finals)
        self._written += len(ended)
        self._ends.forget_before(max(self._written - capacity, 0) * ended.shape[1])
        self._last = after[:, -1].clone()
        return index

    def _set_index_in_td(self, tensordict: TensorDictBase, index: Tensor) -> None:
        """Does nothing: the stored TensorDict is this buffer's own, and nobody reads an index from it."""

    def add(self, data: TensorDictBase) -> int:
        """Not supported, because a single step does not say which environment it comes from."""
        raise TypeError("NStepReplayBuffer takes whole collector batches [N, T]: use extend.")

    def set_sampler(self, sampler: Any) -> None:
        """Not supported: windows are drawn uniformly."""
        raise TypeError("NStepReplayBuffer draws windows uniformly itself and takes no sampler.")

    def _truncate_stored(self, last: TensorDictBase, first: TensorDictBase) -> None:
        """Truncates the newest stored steps whose next observation, ``last``, is not what the new data begins with."""
        slot = (self._written - 1) % self._storage._max_size_along_dim0()
        store = self._storage._storage
        was_open = ~(store[TERMINATED][slot] | store[TRUNCATED][slot]).squeeze(-1)
        broken = observations_differ(last, first)
        rows = (broken & was_open).nonzero().squeeze(-1)
        if len(rows):
            store[TRUNCATED][slot, rows] = True
            finals = {key: self._reduced(last.get(key)[rows], key) for key in self.observations}
            self._ends.add((self._written - 1) * len(was_open) + rows, finals)
            self._ends.sort()  # other rows may have ended at the same step
            self._forget_episodes(rows)

    def _forget_episodes(self, rows: Tensor | slice) -> None:
        """Tells the reward normalizer that new episodes start in these rows."""
        for part in self._transform.modules():
            if isinstance(part, RewardNormalizer):
                part.returns[rows] = 0.0

    def _reduced(self, value: Tensor, key: NestedKey) -> Tensor:
        """An observation in the type that it is stored in."""
        return value if self.observation_dtype is None else in_precision(value, self.observation_dtype, key)

    def _steps_per_env(self, num_envs: int) -> int:
        return -(self._storage.max_size // -num_envs)  # rounded up

    def _allocate(self, stored: TensorDictBase) -> None:
        """Takes the memory for steps like those of ``stored``, or says how much is missing."""
        per_step = stored[0].bytes() / stored.shape[1]
        needed = int(per_step * self._steps_per_env(stored.shape[1]) * stored.shape[1])
        require_space(
            "A replay buffer",
            self._storage.max_size,
            needed,
            "max_size (buffer_size of a run), store observations in half the bytes with "
            "observation_dtype=torch.bfloat16 (buffer_dtype), or keep the data on disk with memmap (buffer_dir)",
            device=self.device,
            folder=self.memmap,
        )
        with unannounced():
            self._storage._init(stored[0])
        if self.memmap is not None:
            with disk_space(Path(self.memmap), "the replay buffer", needed):
                reserve(Path(self._storage.scratch_dir))

    @property
    def samplable(self) -> int:
        """Number of steps that can be drawn: those with a complete window behind them."""
        if self._last is None:
            return 0
        return max(self._rows() - self.n_steps, 0) * len(self._last)

    def _rows(self) -> int:
        return min(self._written, self._storage._max_size_along_dim0()) if self._written else 0

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether a window is complete."""
        return self.samplable > 0

    def _sample(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        with self._replay_lock:
            return self._sample_windows(batch_size)

    def _sample_windows(self, batch_size: int) -> tuple[TensorDictBase, dict[str, Any]]:
        count = self.samplable
        if not count or self._last is None:
            raise RuntimeError(
                f"NStepReplayBuffer holds {self._rows()} steps per environment and needs more than n_steps="
                f"{self.n_steps} to sample. Extend it first."
            )
        num_envs = len(self._last)
        # Position = time * num_envs + environment. The newest n_steps time steps have no complete window yet.
        drawn = torch.randint(count, (batch_size,), generator=self._rng, device=self.device)
        first = drawn + (self._written - self._rows()) * num_envs
        reward, terminated, truncated = (self._flat(key) for key in (REWARD, TERMINATED, TRUNCATED))
        steps, outcome = n_step_windows(reward, terminated, truncated, first, num_envs, self.n_steps, self.gamma)
        last = first + num_envs * (steps.squeeze(-1) - 1)
        data, after = self._observations(first, last, outcome["done"].squeeze(-1))
        action = self._flat(self.action_key)
        place = first % len(action)
        data.set(self.action_key, action[place])
        data.set("next", after.update(outcome)).set("steps_to_next_obs", steps)
        if self._transform is not None and len(self._transform):
            data = self._transform(data)
        return data, {"index": torch.stack([place // num_envs, place % num_envs], -1)}

    def _flat(self, key: NestedKey) -> Tensor:
        """A stored entry with time and environment as one dimension: row = time * num_envs + environment."""
        value = self._storage._storage.get(key)
        return value.view(value.shape[0] * value.shape[1], *value.shape[2:])

    def _observations(self, first: Tensor, last: Tensor, ended: Tensor) -> tuple[TensorDictBase, TensorDictBase]:
        """The observations at the steps ``first`` and after the steps ``last``, some of which ended an episode."""
        before = TensorDict(batch_size=first.shape, device=self.device)
        after = TensorDict(batch_size=first.shape)
        num_envs = self._storage._storage.shape[1]
        kept = self._ends.find(last) if len(self._ends) else None
        for key in self.observations:
            column = self._flat(key)
            following = column[(last + num_envs) % len(column)]
            if kept is not None:
                final = self._ends.values[key][kept]
                following = torch.where(ended.view(-1, *[1] * (final.dim() - 1)), final, following)
            before.set(key, column[first % len(column)].to(self._dtypes[key]))
            after.set(key, following.to(self._dtypes[key]))
        return before, after

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all data; the storage stays allocated."""
        with self._futures_lock:  # samples that were drawn ahead are forgotten with their data
            self._clear_prefetch_queue_locked()
            super().empty(empty_write_count)
            self._written, self._last, self._ends = 0, None, EpisodeEnds()

    def state_dict(self) -> dict[str, Any]:
        """The stored data (with ``save_data``) and the state of the transforms.

        The data is copied into memory, except with ``memmap`` in a single process: it may not fit into memory, so the
        tensors on disk are returned.
        """
        state: dict[str, Any] = {"transforms": dict(self._transform.state_dict()), "written": 0}
        if not self.save_data or self._last is None:
            return state
        store, rows = self._storage._storage, self._rows()
        # With several processes the states are sent to the first one.
        in_place = self.memmap is not None and not several_processes()
        state["written"], state["data"] = self._written, {}
        for key in store.keys(True, True):
            value = store.get(key).as_subclass(Tensor)[:rows]
            state["data"][key_name(key)] = value if in_place else value.to("cpu", copy=True)
        state["last"] = {key_name(key): value.clone() for key, value in self._last.items(True, True)}
        state["dtypes"] = {key_name(key): torch.zeros(0, dtype=dtype) for key, dtype in self._dtypes.items()}
        state["ends"] = self._ends.state_dict()
        if self._rng is not None:
            state["rng"] = self._rng.get_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict`` into a buffer of the same settings; what was there is forgotten.

        Raises:
            ValueError: if the saved data does not fit ``max_size``, or holds other observations.
        """
        self.empty()
        self._transform.load_state_dict(state_dict["transforms"])
        if not state_dict["written"]:
            self._forget_episodes(slice(None))  # nothing is left to tell whether they go on
            return
        dtypes = {named_key(name): value.dtype for name, value in state_dict["dtypes"].items()}
        if set(dtypes) != set(self.observations):
            raise ValueError(
                f"The saved replay buffer holds the observations {list(dtypes)}, this one {self.observations}. Restore "
                "it with those it was saved with."
            )
        data = {named_key(name): value.to(self.device) for name, value in state_dict["data"].items()}
        self._ends.load_state_dict(state_dict["ends"], self.device)
        for key, dtype in dtypes.items():  # it may have been saved in another precision
            for values in (data, self._ends.values):
                if key in values:
                    values[key] = self._reduced(values[key].to(dtype), key)
        rows, num_envs = next(iter(data.values())).shape[:2]
        stored = TensorDict(data, [rows, num_envs], device=self.device)
        self._load_steps(stored, int(state_dict["written"]))
        last = {named_key(name): value.to(self.device) for name, value in state_dict["last"].items()}
        self._last = TensorDict(last, [num_envs], device=self.device)
        self._dtypes = dtypes
        if self._rng is not None and "rng" in state_dict:
            self._rng.set_state(state_dict["rng"])

    def _load_steps(self, stored: TensorDictBase, written: int) -> None:
        """Fills the storage with saved steps ``[T, N]`` and continues writing behind them."""
        if not self._storage.initialized:
            self._allocate(stored)
        capacity, rows = self._storage._max_size_along_dim0(), len(stored)
        if rows > capacity or rows < min(written, capacity):
            raise ValueError(
                f"The saved replay buffer holds {stored.numel():,} steps and does not fit one of max_size "
                f"{self._storage.max_size:,}. Restore it with the size it was saved with."
            )
        self._storage.set(range(rows), stored)
        self._written = self._writer._write_count = written
        self._writer._cursor = written % capacity

    def dumps(self, path: str | Path) -> None:
        """Writes ``state_dict`` into the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        # Through Python's file: torch's own says nothing of a full disk.
        with open(Path(path) / "replay.pt", "wb") as file:
            torch.save(self.state_dict(), file)

    def loads(self, path: str | Path) -> None:
        """Restores what ``dumps`` wrote."""
        self.load_state_dict(torch.load(Path(path) / "replay.pt", map_location=self.device, weights_only=True))
