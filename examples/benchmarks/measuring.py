"""How the benchmarks measure: cases in turn, medians and spreads, one row per comparison."""

from __future__ import annotations

import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

EXAMPLES = Path(__file__).resolve().parent.parent
PACKAGES = ("edenrl", "torch", "torchrl", "tensordict", "mujoco", "gymnasium", "rsl-rl-lib", "stable-baselines3")


@dataclass(frozen=True)
class Settings:
    """What all cases share."""

    device: str = "cpu"
    quick: bool = False
    """Fewer repetitions and smaller sizes."""
    compile: bool = False
    """Whether our losses run through torch.compile. The peers stay as they are."""
    num_envs: tuple[int, ...] = (16, 256, 4096)
    """Environments of the PPO and collection cases. The last number is also that of the GAE and memory cases."""
    repeats: int = 7
    """Measured repetitions of each case."""

    @property
    def warmups(self) -> int:
        """Repetitions before the measured ones; compiled code is compiled in them."""
        return 3 if self.compile else 1


@dataclass(frozen=True)
class Stat:
    """Median and spread of the repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One comparison. ``ratio`` is the median of ours divided by the median of the peer's; None: not measured."""

    case: str
    work: str
    unit: str
    better: Literal["higher", "lower"]
    ours: Stat | None = None
    peer: str | None = None
    theirs: Stat | None = None
    ratio: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """A library to compare with, which may be missing."""

    name: str
    module: str
    package: str

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def note(self) -> str:
        """What to do where it is missing."""
        return "" if self.installed else f"{self.name} is missing: pip install {self.package}"


RSL_RL = Peer("rsl_rl", "rsl_rl", "rsl-rl-lib==5.5.1")
STABLE_BASELINES = Peer("Stable-Baselines3", "stable_baselines3", "stable-baselines3")
MUJOCO = Peer("MuJoCo", "mujoco", '"edenrl[mujoco]"')


def make_row(
    case: str,
    work: str,
    unit: str,
    ours: Sequence[float],
    peer: str | None = None,
    theirs: Sequence[float] | None = None,
    *,
    better: Literal["higher", "lower"],
    note: str = "",
) -> Row:
    """The row of two lists of measurements; the peer's is None where the peer is missing."""
    mine = Stat.of(ours)
    if theirs is None:
        return Row(case, work, unit, better, mine, peer, note=note)
    other = Stat.of(theirs)
    return Row(case, work, unit, better, mine, peer, other, mine.median / other.median, note)


def clock(device: str = "cpu") -> float:
    """Seconds of the wall clock, once the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(run: Callable[[], object], device: str = "cpu") -> Callable[[], float]:
    """A function that runs `run` and returns how long it took."""

    def timed() -> float:
        began = clock(device)
        run()
        return clock(device) - began

    return timed


def alternate(cases: Mapping[str, Callable[[], Any]], repeats: int, warmups: int = 1) -> dict[str, list[Any]]:
    """What each case returned, repetition by repetition: all cases in turn, so that what slows one slows the others."""
    results: dict[str, list[Any]] = {name: [] for name in cases}
    for repeat in range(warmups + repeats):
        for name, run in cases.items():
            result = run()
            if repeat >= warmups:
                results[name].append(result)
    return results


def in_process(code: str) -> str:
    """What Python code prints in a process of its own that can import the examples."""
    paths = [str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def machine(device: str) -> dict[str, Any]:
    """The facts that a number depends on."""
    cuda = torch.device(device).type == "cuda"
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "versions": versions,
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout, with a plus where tracked files have changed since."""
    git = ["git", "-c", "safe.directory=*", "-C", str(EXAMPLES)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changed else head
