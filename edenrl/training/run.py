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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.checkpoint import Checkpoint, CheckpointError, GlobalRNGState

from edenrl import distributed
from edenrl.config import RunConfig, load_config, refuse_changes, save_config
from edenrl.envs import action_saturation
from edenrl.optim import GradientStep
from edenrl.training.checkpoint import Checkpoints
from edenrl.training.exporting import export_run, require_export
from edenrl.training.loggers import RunLogger
from edenrl.training.progress import Progress, format_table

try:
    import fcntl
except ImportError:  # Windows: two processes in one run directory go unnoticed
    fcntl = None  # type: ignore[assignment]

__all__ = ["Run", "average", "rollout_metrics", "run_script", "setup"]

# torchrun passes a signal on that a terminal has already sent to every process.
_ONE_PRESS = 2.0


def setup(cfg: RunConfig) -> torch.device:
    """Seeds Python, NumPy and torch, sets the thread count, and returns the device that ``cfg.device`` means.

    Under ``torchrun`` it joins the other processes first; each seeds with ``cfg.seed`` plus its rank and takes a GPU of
    its own, see ``edenrl.distributed``.
    """
    if cfg.num_threads is not None:
        torch.set_num_threads(cfg.num_threads)
    try:
        device = torch.empty(0, device=distributed.local_device(cfg.device)).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={cfg.device!r} cannot be used here ({error}). Set --device cpu.") from None
    distributed.start(device, cfg.process_timeout)
    seed = cfg.seed + distributed.rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    return device


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
            # A running episode may hold anything, NaN too; one that ended with NaN must show it.
            total = value.flatten().double().where(done, 0.0).sum()
            out[f"episode/{'success_rate' if name == 'success' else name}"] = total / done.sum()
    if box is not None:
        out["action_saturation"] = action_saturation(rollout["action"], box)
    return out


def _lock(path: Path) -> IO[str]:
    """Holds a run directory for this process; the system lets go of it however the process ends."""
    while True:
        file = open(path, "w")
        if fcntl is None:
            return file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its owner may have removed the file between the two calls above: such a lock would keep nobody out.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BlockingIOError:
            file.close()
            raise BlockingIOError(
                f"Another process is training in {path.parent}. Wait for it or stop it, or choose another --run_dir."
            ) from None
        file.close()


class _Silent:
    """Logger and progress of a process that leaves both to the first one: takes any call, does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Run:
    """The frame of a training script: iterate over it, log into it, and it does the rest.

    Entering creates the run directory (``config.json`` first) or, with ``cfg.resume``, restores the newest checkpoint.
    Iterating yields iteration numbers, each once over all resumptions, and after the body of each writes progress and,
    ten times a run by default, evaluates and saves a checkpoint. The first Ctrl-C (or SIGTERM) ends the iteration,
    saves and leaves with exit status 130; the second ends at once. A process killed at any instant can be resumed from
    the previous checkpoint.

    Processes that train together (``torchrun``) start with the first one's parameters, stop at the same iteration when
    any of them is asked to, and resume each in its own state; metrics are averaged over them, and only the first
    evaluates, prints and writes.

    Args:
        cfg: the resolved configuration.
        algorithm: the algorithm's name, stamped on checkpoints.
        components: everything that must continue: networks, optimizers, the GradientStep, the collector. Random states
            and counters are added.
        iterations: iterations of the whole run.
        frames_per_iteration: environment steps per iteration, all environments of this process together.
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
        workers = [getattr(component, "num_workers", None) for component in components.values()]
        if cfg.collector != "single" and cfg.num_workers not in workers:
            raise ValueError(
                f"This script collects in one process, not with {cfg.collector!r}. Set --collector single."
            )
        self.cfg, self.algorithm, self.iterations = cfg, algorithm, iterations
        # Updates are taken together, frames by each process for itself.
        processes = distributed.world_size() if unit == "frames" else 1
        self.frames_per_iteration, self._evaluate, self.unit = frames_per_iteration * processes, evaluate, unit
        self._leads = distributed.rank() == 0
        stamp = distributed.from_first(time.strftime("%Y%m%d-%H%M%S"))
        env_name = "".join(c if c.isalnum() or c in "-_." else "_" for c in cfg.env.name)
        self.dir = Path(cfg.resume or cfg.run_dir or f"runs/{algorithm.lower()}-{env_name}-s{cfg.seed}-{stamp}")
        self.iteration = 0
        self.elapsed = 0.0
        self.evaluation: dict[str, float] = {}
        self._modules = [component for component in components.values() if isinstance(component, nn.Module)]
        # What training keeps equal in all processes is saved once, everything else for each of them.
        shared = (nn.Module, torch.optim.Optimizer, GradientStep)
        own = {name: c for name, c in {**components, "rng": GlobalRNGState()}.items() if not isinstance(c, shared)}
        self._own = {name: distributed.PerProcess(component) for name, component in own.items()}
        self.checkpoints = Checkpoints(
            self.dir / "checkpoints",
            {**components, "run": self, **self._own},
            algorithm=algorithm,
            keep_last=cfg.checkpoint.keep_last,
            best_metric=cfg.evaluation.metric,
            best_mode=cfg.evaluation.mode,
        )
        self.interval = cfg.checkpoint.interval_iterations or max(iterations // 10, 1)
        self.evaluation_interval = cfg.evaluation.interval_iterations or self.interval
        self._stop: str | None = None
        self._parent = os.getppid()
        self._lock: IO[str] | None = None
        self._handlers: dict[int, Any] = {}
        self._stop_asked = -math.inf
        self._ending = False
        # Only the first process replaces them, on entering.
        self.logger: Any = _Silent()
        self.progress: Any = _Silent()
        self._row: dict[str, float] = {}
        self._exported: Mapping[str, Path] = {}
        if cfg.export:
            require_export(components)

    def state_dict(self) -> dict[str, Any]:
        """Counters (the checkpoint's "run" component)."""
        return {"iteration": self.iteration, "elapsed": self.elapsed + time.monotonic() - self._began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counters."""
        self.iteration, self.elapsed = state["iteration"], state["elapsed"]

    def __enter__(self) -> Run:
        cfg = self.cfg
        self._began = time.monotonic()
        if cfg.resume is None and self._leads and (self.dir / "config.json").exists():
            raise FileExistsError(
                f"{self.dir} already holds a run. Continue it with --resume {self.dir}, or choose another --run_dir."
            )
        if self._leads:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.dir / ".lock")
        # Until the first process holds the directory it may be another run's, in which nobody leaves a report.
        distributed.from_first(None)
        try:
            self._refuse_resume()
        except BaseException:  # no fault of the run: no report in its directory
            self._unlock()
            raise
        try:
            self._begin()
            self._catch_signals()
        except BaseException as error:
            self._report(error)
            self._unlock()
            raise
        return self

    def _begin(self) -> None:
        """What entering does while it holds the directory."""
        cfg, config = self.cfg, self.dir / "config.json"
        if self._leads:
            self.checkpoints.sweep()
        resumed = distributed.from_first(cfg.resume is not None and self.checkpoints.latest() is not None)
        if resumed:
            self.checkpoints.load()
            self._began = time.monotonic()
        distributed.broadcast_modules(self._modules)
        if not self._leads:
            return
        # Where the run lies is not part of it: the file must fit a moved run, and a new run that starts from it.
        once: dict[str, Any] = {"resume": None, "run_dir": None, "resume_schedule": "restore"}
        save_config(cfg.model_copy(update=once), config)
        for report in self.dir.glob("error*.txt"):
            report.unlink()
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

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Only the main thread may install handlers; elsewhere Ctrl-C keeps its default meaning.
            with contextlib.suppress(ValueError):
                self._handlers[number] = signal.signal(number, self._request_stop)

    def _refuse_resume(self) -> None:
        config, path = self.dir / "config.json", self.checkpoints.latest()
        if self.cfg.resume is None:
            return
        if config.exists():
            refuse_changes(load_config(type(self.cfg), config), self.cfg, str(config))
        present = distributed.world_size()
        saved = present if path is None else Checkpoint.manifest(path)["metadata"].get("processes", 1)
        if saved != present:
            how = f"torchrun --nproc_per_node {saved}" if saved > 1 else "python, without torchrun"
            raise ValueError(
                f"{path} was saved by {saved} process(es), this run has {present}: environments and random states "
                f"belong to their process. Resume it with {how}."
            )

    @property
    def remaining(self) -> int:
        """Iterations still to do."""
        return max(self.iterations - self.iteration, 0)

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop is not None:
            if distributed.world_size() > 1 and time.monotonic() - self._stop_asked < _ONE_PRESS:
                return
            raise KeyboardInterrupt
        self._stop, self._stop_asked = signal.Signals(number).name, time.monotonic()
        self.progress.say("Stopping after this iteration; once more to stop at once.")

    def __iter__(self) -> Iterator[int]:
        while self.iteration < self.iterations and not self._ending:
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
        if evaluated and self._evaluate is not None and self._leads:
            self.evaluation = self._evaluate()
            self._row.update({f"eval/{name}": value for name, value in self.evaluation.items()})
        if self._stop is None and distributed.world_size() > 1 and os.getppid() != self._parent:
            # torchrun was killed outright: nobody would end these processes, and they hold the run directory.
            self._stop = "end of the launcher"
            self.progress.say("torchrun has ended: stopping after this iteration.")
        # One exchange for the metrics and for the decision to stop, which all processes must take together.
        everyone = distributed.exchange((self._row, self._stop))
        self._ending = any(stop is not None for _, stop in everyone)
        self._row = distributed.average_rows([row for row, _ in everyone])
        frames = self.iteration * self.frames_per_iteration
        # The row is written before the checkpoint: a crash between the two is mended by dropping rows on resume.
        seconds = self.elapsed + time.monotonic() - self._began
        self.logger.write(self.iteration - 1, {"frames": frames, "seconds": round(seconds, 2), **self._row})
        if due or self._ending:
            self._save(evaluated)
        self.progress.update(frames, self._row)

    def _save(self, evaluated: bool) -> None:
        for component in self._own.values():
            component.collect()
        if not self._leads:
            return
        name = self.cfg.evaluation.metric
        score = self.evaluation.get(name, math.nan) if evaluated else math.nan
        metric = {} if math.isnan(score) else {name: score}
        frames = self.iteration * self.frames_per_iteration
        self.checkpoints.save(self.iteration, frames=frames, processes=distributed.world_size(), **metric)
        # Only now: a mistyped name must not cost the iterations up to here.
        if evaluated and name not in self.evaluation:
            raise ValueError(
                f"evaluation.metric is {name!r}; this evaluation measures {sorted(self.evaluation)}. Nothing is lost: "
                f"continue with --resume {self.dir} --evaluation.metric NAME."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        together = distributed.world_size() > 1
        for number, handler in self._handlers.items():
            # The end has been asked for; what torchrun passes on late must not disturb it.
            signal.signal(number, signal.SIG_IGN if together and self._ending else handler)
        complete = error is None and self.iteration >= self.iterations
        self.progress.close("complete" if complete else "interrupted" if error is None else "failed")
        self.logger.close()
        try:
            if complete and self.cfg.export and self._leads:
                self._exported = export_run(self.cfg, self.checkpoints.components["policy"], self.dir)
        except Exception as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._report(error)
            self._unlock()
        if error is None and self._leads and not self.cfg.quiet:
            print(self.summary(), flush=True)
        if error is None:
            # torchrun ends the others as soon as one has left with an error status: let the first one finish.
            distributed.exchange(None)
        if error is None and self._ending and not complete:
            raise SystemExit(130)

    def _report(self, error: BaseException) -> None:
        """Leaves the traceback in the run directory, and on the error what ``run_script`` says about it."""
        if not isinstance(error, Exception):
            return
        path = self.dir / ("error.txt" if self._leads else f"error-{distributed.rank()}.txt")
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            path.write_text(f"Iteration {self.iteration} of {self.iterations}\n{''.join(lines)}", encoding="utf-8")
            vars(error)["edenrl_report"] = f"iteration {self.iteration}; the full traceback is in {path}"

    def _unlock(self) -> None:
        if self._lock is not None:
            # Removed while it is held: afterwards it could be another process's.
            (self.dir / ".lock").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

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
        if self._exported:
            rows["exported policy"] = self._exported["spec"].parent
        rows["run directory"] = self.dir
        if self.iteration < self.iterations:
            together = distributed.world_size()
            launcher = "python" if together == 1 else f"torchrun --nproc_per_node {together}"
            rows["continue with"] = f"{launcher} {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(self.dir))}"
        return "\n" + format_table(rows, f"{self.algorithm} on {self.cfg.env.name}")


def run_script(main: Callable[[], Any]) -> None:
    """Runs a script's ``main``; foreseen errors end in one readable message and exit status 1.

    Set ``EDENRL_TRACEBACK=1`` for the full traceback; an error within a run also leaves it in ``RUN/error.txt``.
    """
    try:
        with distributed.failing_together():
            main()
    except (ValueError, KeyError, FloatingPointError, ImportError, OSError, RuntimeError) as error:
        if os.environ.get("EDENRL_TRACEBACK") == "1":
            raise
        foreseen = isinstance(error, CheckpointError) or not isinstance(error, RuntimeError)
        if not foreseen:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        who = f"process {distributed.rank()}: " if distributed.world_size() > 1 else ""
        where = vars(error).get("edenrl_report", "EDENRL_TRACEBACK=1 shows where it came from")
        print(f"{who}error: {text}\n({where})", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("Stopped at once; resume from the last checkpoint with --resume RUN_DIR.", file=sys.stderr)
        raise SystemExit(130) from None
