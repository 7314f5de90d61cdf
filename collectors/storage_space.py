"""Where large data may lie: whether it fits, and a folder that no other buffer uses."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torchrl._utils import logger as torchrl_logger
from torchrl.envs import EnvBase

from edenrl.modules import several_processes

__all__ = ["free_bytes", "own_folder", "require_rollout_space", "require_space", "reserve", "unannounced"]


def require_space(
    what: str,
    count: int,
    needed: float,
    advice: str,
    *,
    unit: str = "step",
    device: torch.device,
    folder: str | Path | None = None,
) -> None:
    """Refuses data that is larger than what is free, before any of it is allocated.

    Args:
        what: names the data.
        count: how many units it holds.
        needed: bytes that they need together.
        advice: what can be changed; it continues "lower ".
        unit: what is counted. Default "step".
        device: where the memory is.
        folder: if given, the data lies on the disk that holds this folder.

    Raises:
        ValueError: with the bytes needed and free, and what can be changed.
    """
    free = free_bytes(device, folder)
    if free is None or needed <= free:
        return
    each = needed / count
    place = "disk space" if folder is not None else f"memory on {device}"
    raise ValueError(
        f"{what} of {count:,} {unit}s needs {int(needed):,} bytes ({each:.0f} per {unit}), but {free:,} bytes of "
        f"{place} are free. At most {int(free / each):,} {unit}s fit. Lower {advice}."
    )


def require_rollout_space(env: EnvBase, frames: int, device: torch.device | None = None) -> None:
    """Refuses a rollout that does not fit, by the specs of its environment, before it is collected.

    What the policy adds and what training needs beside the rollout is not counted.

    Args:
        env: the environment ``[N]``, with fixed specs.
        frames: steps of a rollout, all environments together.
        device: where rollouts are kept. Default: where the environment is.

    Raises:
        ValueError: with the bytes needed and free, and what can be changed.
    """
    rows = max(env.batch_size.numel(), 1)
    needed = env.fake_tensordict().bytes() / rows * frames
    place = device or env.device or torch.device("cpu")
    advice = "num_envs or the steps per batch (frames_per_batch; steps_per_env of a run)"
    require_space("A rollout", frames, needed, advice, device=torch.device(place))


def free_bytes(device: torch.device, folder: str | Path | None) -> int | None:
    """Bytes that are free for this process, on disk or in memory.

    Args:
        device: where the memory is.
        folder: if given, the disk that holds this folder, which need not exist yet.

    Returns:
        The number of bytes, or None where the system does not say.
    """
    # Memory is taken only when it is written, so processes that allocate at the same time all see the same free bytes.
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
    """Bytes that the memory limits of a container or a job leave (cgroup v2); /proc/meminfo does not show them."""
    try:
        own = next(line[3:] for line in proc.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    out, group = [], root / own.lstrip("/")
    for folder in [group, *group.parents]:
        try:
            limit, used = ((folder / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            if limit != "max":  # cached files make room when memory is needed
                out.append(max(int(limit) - int(used) + int(stat.get("inactive_file", 0)), 0))
        except (OSError, ValueError):
            continue
    return out


def reserve(folder: Path) -> None:
    """Takes the disk space of all files in a folder now.

    A new file of a memory map takes its space only when it is written. A disk that is full by then kills the process
    without a message (SIGBUS).

    Raises:
        OSError: there is not enough space.
    """
    if not hasattr(os, "posix_fallocate"):  # macOS, Windows
        return
    for path in folder.rglob("*"):
        if path.is_file() and (size := path.stat().st_size):
            with open(path, "r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)


def own_folder(owner: object, parent: Path) -> Path:
    """A folder in ``parent`` that no one else gets while ``owner`` lives, in this process or another one."""
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
        # The system releases the lock when the process ends, however it ends.
        weakref.finalize(owner, os.close, file)
        return parent / str(number)
    return Path(tempfile.mkdtemp(dir=parent))


@contextmanager
def unannounced() -> Iterator[None]:
    """Keeps TorchRL from announcing the shape of a new storage on stderr."""
    level = torchrl_logger.level
    torchrl_logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        torchrl_logger.setLevel(level)
