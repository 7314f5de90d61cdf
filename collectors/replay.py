"""Replay that stores every observation once and answers with n-step transitions."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torch import Tensor
from torchrl._utils import logger as torchrl_logger
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.envs import Transform

from edenrl.collectors.reward_normalizer import RewardNormalizer
from edenrl.modules import several_processes

__all__ = ["NStepReplayBuffer"]

_REWARD, _TERMINATED, _TRUNCATED = ("next", "reward"), ("next", "terminated"), ("next", "truncated")


class NStepReplayBuffer(TensorDictReplayBuffer):
    """TorchRL's replay buffer in about half the memory, sampling n-step transitions.

    ``extend`` takes what a collector yields, ``[N, T]`` in time order, the same N environments each time. Of it the
    buffer keeps observations, action, reward, ``terminated`` and ``truncated``; the observation after a step is the one
    stored with the next step, and only at the ends of episodes it is kept beside them. Steps that do not continue the
    one before (a collector that was reset in the middle of an episode) are found by comparing the two, and count as
    truncated.

    ``sample`` draws uniformly from all steps whose window of ``n_steps`` is complete, with replacement. The window ends
    early at the end of an episode. A sample ``[batch_size]`` holds the observations and the action of its first step,
    and under ``"next"`` the discounted sum of rewards over the window and the true observation, ``done``,
    ``terminated`` and ``truncated`` at its end; ``steps_to_next_obs`` ``[batch_size, 1]`` is its length k. Bootstrap
    with ``gamma ** k``, as TorchRL's losses do; they find the entry by its name.

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
        memmap: directory to keep the data in on disk, instead of memory. Buffers may share it, also those of several
            processes: each takes a folder in it that no living buffer uses.
        transform: TorchRL transforms, inverse on ``extend``, forward on samples.
        save_data: whether ``state_dict`` holds the data. Without it a restored buffer starts empty.
        kwargs: further options of TorchRL's class, such as ``prefetch`` or ``generator``.

    Raises:
        ValueError: for a setting out of range, data that is not ``[N, T]`` or has another N, observations that
            ``observation_dtype`` cannot hold, or a buffer that the free memory (or disk) cannot, with the number of
            bytes, before it is allocated.
        RuntimeError: for sampling before a window is complete.

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
            raise ValueError(f"memmap keeps the data on disk; leave device={str(device)!r} out and move the samples.")
        self.n_steps, self.gamma, self.memmap, self.save_data = n_steps, gamma, memmap, save_data
        self.observations, self.action_key = [unravel_key(key) for key in observations], unravel_key(action_key)
        self.observation_dtype, self.device = observation_dtype, torch.device(device)
        self._ends = _EpisodeEnds()
        self._written = 0
        self._dtypes: dict[Any, torch.dtype] = {}
        self._last: TensorDictBase | None = None
        storage: LazyTensorStorage = (
            LazyTensorStorage(max_size, ndim=2, device=device)
            if memmap is None
            else LazyMemmapStorage(max_size, ndim=2, scratch_dir=str(_own_folder(self, Path(memmap))), existsok=True)
        )
        # Its brother for TensorDicts would store every index beside the data.
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
        with self._replay_lock:  # with prefetch, samples are drawn in another thread
            return self._extend_rows(tensordicts)

    def _extend_rows(self, tensordicts: TensorDictBase) -> Tensor:
        data = self._stored_part(tensordicts).to(self.device)
        after = data["next"].select(*self.observations)  # the observation after each step, in full precision
        self._mark_breaks(data, after)
        stored = data.exclude(*[("next", key) for key in self.observations]).transpose(0, 1).contiguous()
        for key in self.observations:
            self._dtypes[key] = stored.get(key).dtype
            stored.set(key, self._reduced(stored.get(key), key))
        capacity = -(self._storage.max_size // -stored.shape[1])
        if capacity <= self.n_steps or len(stored) > capacity:
            raise ValueError(
                f"max_size={self._storage.max_size} leaves {capacity} steps for each of {stored.shape[1]} "
                f"environments; it must be more than n_steps={self.n_steps} and hold a batch of {len(stored)}. Raise "
                "max_size."
            )
        if not self._storage.initialized:
            self._allocate(stored)
        ended = (stored[_TERMINATED] | stored[_TRUNCATED]).squeeze(-1)
        finals = {key: self._reduced(after.get(key).transpose(0, 1)[ended], key) for key in self.observations}
        steps, rows = ended.nonzero().unbind(-1)
        index = super().extend(stored)
        self._ends.add((self._written + steps) * ended.shape[1] + rows, finals)
        self._written += len(ended)
        self._ends.forget_before(max(self._written - capacity, 0) * ended.shape[1])
        self._last = after[:, -1].clone()
        return index

    def _set_index_in_td(self, tensordict: TensorDictBase, index: Tensor) -> None:
        """What is handed on is our own: nobody reads an index from it."""

    def add(self, data: TensorDictBase) -> int:
        """Not supported: a single step has no row to belong to."""
        raise TypeError("NStepReplayBuffer takes whole collector batches [N, T]: use extend.")

    def _stored_part(self, data: TensorDictBase) -> TensorDictBase:
        keys = [*self.observations, self.action_key]
        ends = [unravel_key(("next", key)) for key in self.observations]
        kept = data.select(*keys, *ends, _REWARD, _TERMINATED).copy()
        truncated = data.get(_TRUNCATED, None)
        done = data.get(("next", "done"), None)
        if truncated is None and done is None:
            raise KeyError("The data has neither ('next', 'truncated') nor ('next', 'done'): write all three flags.")
        if done is not None:
            over = done & ~kept[_TERMINATED]
            truncated = over if truncated is None else truncated | over
        return kept.set(_TRUNCATED, truncated.clone())

    def _mark_breaks(self, data: TensorDictBase, after: TensorDictBase) -> None:
        """Truncates steps whose next observation is not what the following step began with."""
        open_ended = ~(data[_TERMINATED] | data[_TRUNCATED]).squeeze(-1)
        broken = torch.zeros_like(open_ended)
        for key in self.observations:
            now, then = data.get(key), after.get(key)
            broken[:, :-1] |= _differs(now[:, 1:], then[:, :-1], 2)
        data[_TRUNCATED].squeeze(-1).logical_or_(broken & open_ended)
        if self._last is None:
            return
        capacity = self._storage._max_size_along_dim0()
        slot = (self._written - 1) % capacity
        store = self._storage._storage
        was_open = ~(store[_TERMINATED][slot] | store[_TRUNCATED][slot]).squeeze(-1)
        broken = torch.zeros_like(was_open)
        for key in self.observations:
            broken |= _differs(data.get(key)[:, 0], self._last.get(key), 1)
        rows = (broken & was_open).nonzero().squeeze(-1)
        if len(rows):
            store[_TRUNCATED][slot, rows] = True
            finals = {key: self._reduced(self._last.get(key)[rows], key) for key in self.observations}
            self._ends.add((self._written - 1) * len(was_open) + rows, finals)
            self._ends.sort()  # other rows may have ended at the same step
            self._forget_episodes(rows)

    def _forget_episodes(self, rows: Tensor | slice) -> None:
        for part in self._transform.modules():
            if isinstance(part, RewardNormalizer):
                part.returns[rows] = 0.0

    def _reduced(self, value: Tensor, key: NestedKey) -> Tensor:
        if self.observation_dtype is None or not value.is_floating_point():
            return value
        out = value.to(self.observation_dtype)
        if self.observation_dtype == torch.float16 and bool((out.isinf() & value.isfinite()).any()):
            raise ValueError(
                f"{key!r} holds {float(value.abs().max()):.3g}, which float16 cannot (65504 is its largest). Use "
                "observation_dtype=torch.bfloat16, or scale the observation."
            )
        return out

    def _allocate(self, stored: TensorDictBase) -> None:
        per_step = stored[0].bytes() / stored.shape[1]
        rows = -(self._storage.max_size // -stored.shape[1])
        needed, free = int(per_step * rows * stored.shape[1]), _free_bytes(self.device, self.memmap)
        if free is not None and needed > free:
            place = "disk space" if self.memmap is not None else f"memory on {self.device}"
            raise ValueError(
                f"A replay buffer of {self._storage.max_size:,} steps needs {needed:,} bytes ({per_step:.0f} per "
                f"step), free are {free:,} bytes of {place}. The largest that fits holds {int(free / per_step):,}; or "
                "store observations in half the bytes with observation_dtype=torch.bfloat16, or on disk with memmap."
            )
        level = torchrl_logger.level
        torchrl_logger.setLevel(logging.WARNING)  # it would announce the shape on stderr
        try:
            self._storage._init(stored[0])
        finally:
            torchrl_logger.setLevel(level)

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
        num_envs, store = len(self._last), self._storage._storage
        capacity = self._storage._max_size_along_dim0()
        # Flat positions since the beginning, environments fastest; the newest n_steps rows have no next observation.
        drawn = torch.randint(count, (batch_size,), generator=self._rng, device=self.device)
        first = drawn + (self._written - self._rows()) * num_envs
        size = capacity * num_envs
        flat = {key: store.get(key).view(size, *store.get(key).shape[2:]) for key in (_REWARD, _TERMINATED, _TRUNCATED)}
        window = (first.unsqueeze(-1) + num_envs * torch.arange(self.n_steps, device=self.device)) % size
        terminated, truncated = (flat[key][window].squeeze(-1) for key in (_TERMINATED, _TRUNCATED))
        ended = terminated | truncated
        over = ended.cumsum(-1)
        counted = over - ended.long() == 0  # up to and including the first end
        steps = counted.sum(-1, keepdim=True)
        reward = flat[_REWARD][window].squeeze(-1)
        discounts = self.gamma ** torch.arange(self.n_steps, device=self.device, dtype=reward.dtype)
        reward = (torch.where(counted, reward, 0.0) * discounts).sum(-1, keepdim=True)
        terminated, truncated = (flags.gather(-1, steps - 1) for flags in (terminated, truncated))
        last = first + num_envs * (steps.squeeze(-1) - 1)
        ended = (terminated | truncated).squeeze(-1)
        here, there = first % size, (last + num_envs) % size
        data, after = TensorDict(batch_size=[batch_size], device=self.device), TensorDict(batch_size=[batch_size])
        kept = self._ends.find(last) if len(self._ends) else None
        for key in self.observations:
            column = store.get(key).view(size, *store.get(key).shape[2:])
            following = column[there]
            if kept is not None:
                final = self._ends.values[key][kept]
                following = torch.where(ended.view(-1, *[1] * (final.dim() - 1)), final, following)
            data.set(key, column[here].to(self._dtypes[key]))
            after.set(key, following.to(self._dtypes[key]))
        action = store.get(self.action_key)
        data.set(self.action_key, action.view(size, *action.shape[2:])[here])
        after.update({"reward": reward, "terminated": terminated, "truncated": truncated})
        after.set("done", terminated | truncated)
        data.set("next", after).set("steps_to_next_obs", steps)
        if self._transform is not None and len(self._transform):
            data = self._transform(data)
        return data, {"index": torch.stack([here // num_envs, here % num_envs], -1)}

    def empty(self, empty_write_count: bool = True) -> None:
        """Forgets all data; the storage stays allocated."""
        with self._futures_lock:  # nor may samples that were drawn ahead outlive their data
            self._clear_prefetch_queue_locked()
            super().empty(empty_write_count)
            self._written, self._last, self._ends = 0, None, _EpisodeEnds()

    def state_dict(self) -> dict[str, Any]:
        """What is stored (with ``save_data``), as far as it is filled, and the transforms' state.

        It is a copy in memory; with ``memmap``, whose data may not fit there, in a single process the data on disk.
        """
        state: dict[str, Any] = {"transforms": dict(self._transform.state_dict()), "written": 0}
        if not self.save_data or self._last is None:
            return state
        store, rows = self._storage._storage, self._rows()
        in_place = self.memmap is not None and not several_processes()  # several send their states to the first
        leaves = {}
        for key in store.keys(True, True):
            value = store.get(key).as_subclass(Tensor)[:rows]
            leaves[_name(key)] = value if in_place else value.to("cpu", copy=True)
        last = {_name(key): value.clone() for key, value in self._last.items(True, True)}
        dtypes = {_name(key): torch.zeros(0, dtype=dtype) for key, dtype in self._dtypes.items()}
        ends = self._ends.state_dict()
        rng = {} if self._rng is None else {"rng": self._rng.get_state()}
        return {**state, "written": self._written, "data": leaves, "last": last, "dtypes": dtypes, "ends": ends, **rng}

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
        dtypes = {_key(name): value.dtype for name, value in state_dict["dtypes"].items()}
        if set(dtypes) != set(self.observations):
            raise ValueError(
                f"The saved replay buffer holds the observations {list(dtypes)}, this one {self.observations}. Restore "
                "it with those it was saved with."
            )
        data = {_key(name): value.to(self.device) for name, value in state_dict["data"].items()}
        self._ends.load_state_dict(state_dict["ends"], self.device)
        for key, dtype in dtypes.items():  # it may have been saved in another precision
            for values in (data, self._ends.values):
                if key in values:
                    values[key] = self._reduced(values[key].to(dtype), key)
        rows, num_envs = next(iter(data.values())).shape[:2]
        stored = TensorDict(batch_size=[rows, num_envs], device=self.device)
        for key, value in data.items():
            stored.set(key, value)
        if not self._storage.initialized:
            self._allocate(stored)
        capacity = self._storage._max_size_along_dim0()
        if rows > capacity or rows < min(state_dict["written"], capacity):
            raise ValueError(
                f"The saved replay buffer holds {rows * num_envs:,} steps and does not fit one of max_size "
                f"{self._storage.max_size:,}. Restore it with the size it was saved with."
            )
        self._storage.set(range(rows), stored)
        self._written = int(state_dict["written"])
        self._writer._cursor = self._written % capacity
        self._writer._write_count = self._written
        last = {_key(name): value.to(self.device) for name, value in state_dict["last"].items()}
        self._last = TensorDict(batch_size=[num_envs], device=self.device)
        for key, value in last.items():
            self._last.set(key, value)
        self._dtypes = dtypes
        if self._rng is not None and "rng" in state_dict:
            self._rng.set_state(state_dict["rng"])

    def dumps(self, path: str | Path) -> None:
        """Writes ``state_dict`` into the folder ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "replay.pt")

    def loads(self, path: str | Path) -> None:
        """Restores what ``dumps`` wrote."""
        self.load_state_dict(torch.load(Path(path) / "replay.pt", map_location=self.device, weights_only=True))


class _EpisodeEnds:
    """The last observations of episodes, by the flat position of their step, in ascending order.

    A queue in one block of memory: new ends come behind, forgotten ones leave at the front, and what is alive moves to
    the front of a block twice its size when the block is full.
    """

    def __init__(self) -> None:
        self.positions = torch.zeros(0, dtype=torch.long)
        self.values: dict[Any, Tensor] = {}
        self._front = self._back = 0

    def __len__(self) -> int:
        return self._back - self._front

    def add(self, positions: Tensor, values: dict[Any, Tensor]) -> None:
        count = len(positions)
        if not count:
            return
        if self._back + count > len(self.positions):
            self._move(2 * (len(self) + count), positions, values)
        place = slice(self._back, self._back + count)
        self.positions[place] = positions
        for key, value in values.items():
            self.values[key][place] = value
        self._back += count

    def _move(self, size: int, positions: Tensor, values: dict[Any, Tensor]) -> None:
        alive, count = slice(self._front, self._back), len(self)
        # Unused places sort behind everything.
        moved = torch.full((size,), torch.iinfo(torch.long).max, device=positions.device)
        moved[:count] = self.positions[alive]
        self.positions = moved
        for key, value in values.items():
            block = value.new_empty(size, *value.shape[1:])
            if count:
                block[:count] = self.values[key][alive]
            self.values[key] = block
        self._front, self._back = 0, count

    def sort(self) -> None:
        alive = slice(self._front, self._back)
        order = self.positions[alive].argsort()
        for block in (self.positions, *self.values.values()):
            block[alive] = block[alive][order]

    def forget_before(self, position: int) -> None:
        if len(self):
            self._front = int(torch.searchsorted(self.positions[: self._back], position))
            self._front = min(self._front, self._back)

    def find(self, positions: Tensor) -> Tensor:
        """Where the values of ``positions`` lie; anywhere for a position without an end."""
        return torch.searchsorted(self.positions, positions).clamp_max(self._back - 1)

    def state_dict(self) -> dict[str, Any]:
        alive = slice(self._front, self._back)
        values = {_name(key): value[alive].clone() for key, value in self.values.items()}
        return {"positions": self.positions[alive].clone(), "values": values}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.positions = state["positions"].to(device)
        self.values = {_key(name): value.to(device) for name, value in state["values"].items()}
        self._front, self._back = 0, len(self.positions)


def _name(key: NestedKey) -> str:
    # A part may hold a slash itself, as dm_control's "walker/joints_pos" does.
    parts = (key,) if isinstance(key, str) else key
    return "/".join(str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _key(name: str) -> Any:
    return unravel_key(tuple(part.replace("~1", "/").replace("~0", "~") for part in name.split("/")))


def _differs(now: Tensor, then: Tensor, dims: int) -> Tensor:
    """Where two observations differ, by their first ``dims`` dimensions; NaN is equal to NaN."""
    different = (now != then) & ((now == now) | (then == then))
    return different.flatten(dims).any(-1) if now.dim() > dims else different


def _own_folder(buffer: NStepReplayBuffer, parent: Path) -> Path:
    """A folder in ``parent`` that is this buffer's while it lives: two that shared one would overwrite each other."""
    parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        return Path(tempfile.mkdtemp(dir=parent))
    for number in range(10_000):
        file = os.open(parent / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        except OSError:  # a file system without locks
            os.close(file)
            break
        # The system lets go of the lock with the process, however that ends.
        weakref.finalize(buffer, os.close, file)
        return parent / str(number)
    return Path(tempfile.mkdtemp(dir=parent))


def _free_bytes(device: torch.device, folder: str | Path | None) -> int | None:
    """Bytes that are free for this process, or None where nobody says."""
    # Pages are taken when they are written: processes that allocate together all find the same free.
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if several_processes() else 1
    if folder is not None:
        there = next(path for path in [Path(folder), *Path(folder).resolve().parents] if path.exists())
        return shutil.disk_usage(there).free // processes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min([free, *_group_free_bytes()]) // processes


def _group_free_bytes(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """What the limits of a container or a job leave (cgroup v2), which the machine's own memory does not show."""
    try:
        own = next(line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    out, group = [], root / own.lstrip("/")
    for folder in [group, *group.parents]:
        try:
            limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max":  # cached files give way
                out.append(max(int(limit) - int(used) + int(stat.get("inactive_file", 0)), 0))
        except (OSError, ValueError):
            continue
    return out
