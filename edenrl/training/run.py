"""A run: its directory, its checkpoints, its log, and the loop over iterations that survives interruption."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import CheckpointError, GlobalRNGState

from edenrl.config import RunConfig, save_config
from edenrl.envs import action_saturation
from edenrl.training.checkpoint import Checkpoints
from edenrl.training.loggers import RunLogger
from edenrl.training.progress import Progress, format_table

try:
    import fcntl
except ImportError:  # Windows: two processes in one run directory go unnoticed
    fcntl = None  # type: ignore[assignment]

__all__ = ["Run", "average", "rollout_metrics", "run_script", "setup"]


def setup(cfg: RunConfig) -> torch.device:
    """Seeds Python, NumPy and torch, sets the thread count, and returns the device that ``cfg.device`` means."""
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    random.seed(cfg.seed)
    np.random.seed(cfg.seed % 2**32)
    torch.manual_seed(cfg.seed)
    name = cfg.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={cfg.device!r} cannot be used here ({error}). Set --device cpu.") from None


@torch.no_grad()
def average(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Means of scalar tensors over a list of dictionaries, still on their device.

    Values that are not finite (of a dropped update) are left out.

    Examples:
        >>> average([{"loss": torch.tensor(1.0)}, {"loss": torch.tensor(3.0)}])
        {'loss': tensor(2.)}
    """
    stacked = {name: torch.stack([m[name].detach().float() for m in metrics]) for name in metrics[0]}
    return {name: values.where(values.isfinite(), math.nan).nanmean() for name, values in stacked.items()}


@torch.no_grad()
def rollout_metrics(rollout: TensorDictBase, box: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """What a rollout says about behaviour, as scalar tensors.

    ``episode/return``, ``episode/length``, ``episode/success_rate`` and one entry per ``("next", "metrics", name)`` are
    means over the episodes that ended in it (NaN when none did), ``episode/count`` is their number. With ``box``,
    ``action_saturation`` is the share of action components at or beyond a bound.

    Args:
        rollout: data of any batch shape with ``("next", "done")`` and, from ``edenrl.envs.wrap_env``,
            ``("next", "episode_reward")`` and ``("next", "step_count")``.
        box: bounds of the action as ``edenrl.envs.action_box`` returns them.
    """
    ended = rollout["next"]
    done = ended["done"].flatten()
    sources = {"return": ended.get("episode_reward", None), "length": ended.get("step_count", None)}
    sources |= dict(ended["metrics"].items()) if "metrics" in ended.keys() else {}
    out = {"episode/count": done.sum().float()}
    for name, value in sources.items():
        if value is not None and value.numel() == done.numel():
            # nan_to_num: 0 * NaN is NaN, and a running episode may hold anything.
            total = (value.flatten().double().nan_to_num() * done).sum()
            out[f"episode/{'success_rate' if name == 'success' else name}"] = total / done.sum()
    if box is not None:
        out["action_saturation"] = action_saturation(rollout["action"], box)
    return out


def _lock(path: Path) -> IO[str]:
    """Holds a run directory for this process; the system lets go of it however the process ends."""
    file = open(path, "w")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BlockingIOError(
                f"Another process is training in {path.parent}. Wait for it or stop it, or choose another --run_dir."
            ) from None
    return file


class Run:
    """The frame of a training script: iterate over it, log into it, and it does the rest.

    Entering creates the run directory (``config.json`` first) or, with ``cfg.resume``, restores the newest checkpoint.
    Iterating yields iteration numbers, each once over all resumptions, and after the body of each writes progress and,
    ten times a run by default, evaluates and saves a checkpoint. The first Ctrl-C (or SIGTERM) ends the iteration,
    saves and leaves with exit status 130; the second ends at once. A process killed at any instant can be resumed from
    the previous checkpoint.

    Args:
        cfg: the resolved configuration.
        algorithm: the algorithm's name, stamped on checkpoints.
        components: everything that must continue: networks, optimizers, the GradientStep, the collector. Random states
            and counters are added.
        iterations: iterations of the whole run.
        frames_per_iteration: environment steps per iteration, all environments together.
        evaluate: returns evaluation metrics; ``cfg.evaluation.metric`` decides which checkpoint is the best.
        unit: what ``frames_per_iteration`` counts, for display. With "updates" and 1 a run has a budget in updates; log
            the environment steps as ``frames``.

    Examples:
        ``examples/train_ppo.py`` is one; its loop is ``with run: for iteration in run: ...; run.log(metrics)``.
    """

    def __init__(
        self,
        cfg: RunConfig,
        algorithm: str,
        components: Mapping[str, Any],
        *,
        iterations: int,
        frames_per_iteration: int,
        evaluate: Callable[[], dict[str, float]] | None = None,
        unit: str = "frames",
    ) -> None:
        self.cfg, self.algorithm, self.iterations = cfg, algorithm, iterations
        self.frames_per_iteration, self._evaluate, self.unit = frames_per_iteration, evaluate, unit
        stamp = time.strftime("%Y%m%d-%H%M%S")
        env_name = "".join(c if c.isalnum() or c in "-_." else "_" for c in cfg.env.name)
        self.dir = Path(cfg.run_dir or f"runs/{algorithm.lower()}-{env_name}-s{cfg.seed}-{stamp}")
        self.iteration = 0
        self.elapsed = 0.0
        self.evaluation: dict[str, float] = {}
        self.checkpoints = Checkpoints(
            self.dir / "checkpoints",
            {**components, "run": self, "rng": GlobalRNGState()},
            algorithm=algorithm,
            keep_last=cfg.checkpoint.keep_last,
            best_metric=cfg.evaluation.metric,
            best_mode=cfg.evaluation.mode,
        )
        self.interval = cfg.checkpoint.interval_iterations or max(iterations // 10, 1)
        self.evaluation_interval = cfg.evaluation.interval_iterations or self.interval
        self._stop: str | None = None
        self._row: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Counters (the checkpoint's "run" component)."""
        return {"iteration": self.iteration, "elapsed": self.elapsed + time.monotonic() - self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters."""
        self.iteration, self.elapsed = state["iteration"], state["elapsed"]

    def __enter__(self) -> Run:
        cfg = self.cfg
        self._began = time.monotonic()
        if cfg.resume is None and (self.dir / "config.json").exists():
            raise FileExistsError(
                f"{self.dir} already holds a run. Continue it with --resume {self.dir}, or choose another --run_dir."
            )
        self.dir.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.dir / ".lock")
        self.checkpoints.sweep()
        resumed = cfg.resume is not None and self.checkpoints.latest() is not None
        if resumed:
            self.checkpoints.load()
            self._began = time.monotonic()
        save_config(cfg.model_copy(update={"resume": None, "run_dir": str(self.dir)}), self.dir / "config.json")
        self.logger = RunLogger(
            self.dir,
            kind=cfg.logger.kind,
            first=self.iteration,
            name=self.dir.name,
            project=cfg.logger.project,
            wandb_mode=cfg.logger.wandb_mode,
            config=cfg.model_dump(mode="json"),
        )
        self.progress = Progress(
            self.dir / "progress.json",
            self.iterations * self.frames_per_iteration,
            self.iteration * self.frames_per_iteration,
            quiet=cfg.quiet,
            shown={"episode/return": "return", "episode/success_rate": "success", "eval/return_mean": "evaluated"},
            unit=self.unit,
        )
        if resumed:
            self.progress.say(f"Resumed {self.dir} at iteration {self.iteration} of {self.iterations}.")
        elif cfg.resume is not None:
            self.progress.say(f"{self.dir} has no checkpoint yet: starting from the beginning with its config.json.")
        self._handlers: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only the main thread may install handlers; elsewhere Ctrl-C keeps its default meaning.
            with contextlib.suppress(ValueError):
                self._handlers[number] = signal.signal(number, self._request_stop)
        return self

    @property
    def remaining(self) -> int:
        """Iterations still to do."""
        return max(self.iterations - self.iteration, 0)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None:
            raise KeyboardInterrupt
        self._stop = signal.Signals(number).name
        self.progress.say("Stopping after this iteration; once more to stop at once.")

    def __iter__(self) -> Iterator[int]:
        while self.iteration < self.iterations and self._stop is None:
            self._row = {}
            yield self.iteration
            self._finish_iteration()

    def log(self, *metrics: Mapping[str, Tensor | float]) -> None:
        """Adds scalars to the current iteration's row. Tensors are moved to the host here, all at once."""
        merged = {name: value for group in metrics for name, value in group.items()}
        tensors = {name: value for name, value in merged.items() if isinstance(value, Tensor)}
        if tensors:
            device = next(iter(tensors.values())).device
            stacked = [value.detach().reshape(()).to(device, torch.float64) for value in tensors.values()]
            values = torch.stack(stacked).tolist()
            merged.update(zip(tensors, values, strict=True))
        self._row.update({name: float(value) for name, value in merged.items()})

    def _finish_iteration(self) -> None:
        self.iteration += 1
        last = self.iteration == self.iterations
        evaluated = self._evaluate is not None and (last or self.iteration % self.evaluation_interval == 0)
        due = last or evaluated or self.iteration % self.interval == 0
        if evaluated and self._evaluate is not None:
            self.evaluation = self._evaluate()
            self._row.update({f"eval/{name}": value for name, value in self.evaluation.items()})
        frames = self.iteration * self.frames_per_iteration
        # The row is written before the checkpoint: a crash between the two is mended by dropping rows on resume.
        seconds = self.elapsed + time.monotonic() - self._began
        self.logger.write(self.iteration - 1, {"frames": frames, "seconds": round(seconds, 2), **self._row})
        if due or self._stop is not None:
            self._save(evaluated)
        self.progress.update(frames, self._row)

    def _save(self, evaluated: bool) -> None:
        name = self.cfg.evaluation.metric
        if evaluated and name not in self.evaluation:
            raise ValueError(f"evaluation.metric is {name!r}; this evaluation measures {sorted(self.evaluation)}.")
        score = self.evaluation[name] if evaluated else math.nan
        metric = {} if math.isnan(score) else {name: score}
        self.checkpoints.save(self.iteration, frames=self.iteration * self.frames_per_iteration, **metric)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        complete = error is None and self.iteration >= self.iterations
        self.progress.close("complete" if complete else "interrupted" if error is None else "failed")
        self.logger.close()
        (self.dir / ".lock").unlink(missing_ok=True)
        self._lock.close()
        if error is None and not self.cfg.quiet:
            print(self.summary(), flush=True)
        if error is None and self._stop is not None and not complete:
            raise SystemExit(130)

    def summary(self) -> str:
        """The table a run ends with."""
        seconds = self.elapsed + time.monotonic() - self._began
        frames = self.iteration * self.frames_per_iteration
        rows: dict[str, Any] = {
            self.unit: f"{frames:,} of {self.iterations * self.frames_per_iteration:,}",
            "wall time": f"{seconds:.0f} s ({self.progress.rate:,.0f} {self.unit}/s)",
        }
        result = self.evaluation
        if result:
            rows["evaluation"] = f"{result['episodes']:.0f} episodes of the deterministic policy"
            rows["return"] = (
                f"{result['return_mean']:.2f} +- {result['return_std']:.2f}, median {result['return_median']:.2f}, "
                f"min {result['return_min']:.2f}, max {result['return_max']:.2f}"
            )
            rows["episode length"] = f"{result['length_mean']:.1f}"
            if "success_rate" in result:
                rows["success"] = f"{100 * result['success_rate']:.1f} %"
        best = self.checkpoints.best() or self.checkpoints.latest()
        rows["best checkpoint"] = best or "none yet"
        rows["run directory"] = self.dir
        if self.iteration < self.iterations:
            rows["continue with"] = f"python {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(self.dir))}"
        return "\n" + format_table(rows, f"{self.algorithm} on {self.cfg.env.name}")


def run_script(main: Callable[[], Any]) -> None:
    """Runs a script's ``main``; foreseen errors end in one readable message and exit status 1.

    Set ``EDENRL_TRACEBACK=1`` for the full traceback.
    """
    try:
        main()
    except (ValueError, KeyError, FloatingPointError, ImportError, OSError, RuntimeError) as error:
        if os.environ.get("EDENRL_TRACEBACK") == "1":
            raise
        foreseen = isinstance(error, CheckpointError) or not isinstance(error, RuntimeError)
        if not foreseen:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"error: {text}\n(EDENRL_TRACEBACK=1 shows where it came from)", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("Stopped at once; resume from the last checkpoint with --resume RUN_DIR.", file=sys.stderr)
        raise SystemExit(130) from None
