"""The directory of a run: its lock, its configuration, its checkpoints, its metrics and its progress."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrl.checkpoint import CheckpointError, GlobalRNGState
from torchrl.envs import EnvBase

from edenrl import distributed
from edenrl._files import DiskFullError, disk_space
from edenrl.config import RunConfig, load_config, refuse_changes, save_config
from edenrl.optim import GradientStep
from edenrl.training.checkpoint import Checkpoints
from edenrl.training.checkpoint_folder import has_checkpoint
from edenrl.training.lock import DirectoryLock
from edenrl.training.loggers import RunLogger
from edenrl.training.observations import changed_observations, describe_observations, save_observations
from edenrl.training.progress import Progress
from edenrl.training.reports import save_error
from edenrl.training.stopping import has_lost_workers

__all__ = ["RunFolder", "run_directory"]

# What the progress line shows, and the word for it.
_SHOWN = {"episode/return": "return", "episode/success_rate": "success", "eval/return_mean": "evaluated"}


def run_directory(cfg: RunConfig, algorithm: str) -> Path:
    """The directory of a run: the one that ``cfg`` names, or ``runs/<algorithm>-<env>-s<seed>-<time>``.

    The latter is created here, for two runs of a sweep may begin in the same second: the second gets ``-2``.
    """
    if cfg.resume or cfg.run_dir:
        return Path(cfg.resume or cfg.run_dir or "")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    env_name = "".join(c if c.isalnum() or c in "-_." else "_" for c in cfg.env.name)
    created = _create(Path("runs"), f"{algorithm.lower()}-{env_name}-s{cfg.seed}-{stamp}")
    return Path(distributed.from_first(created))


def _create(parent: Path, name: str) -> Path | None:
    """A new directory of that name, or the first free one of ``name-2``, ``name-3``, ...; only the first process."""
    if distributed.rank() != 0:
        return None
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


class _Silent:
    """Logger and progress of a process that leaves both to the first one: takes any call, does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _is_sound(state: Any) -> bool:
    """Whether no tensor in a state is NaN. Infinity may stand for a bound or for a best score so far."""
    if torch.is_tensor(state):
        return not bool(state.isnan().any())
    if isinstance(state, Mapping):
        return all(map(_is_sound, state.values()))
    return not isinstance(state, (list, tuple)) or all(map(_is_sound, state))


class RunFolder:
    """Everything that a run writes. Of several processes only the first one writes; the others take part in exchanges.

    Args:
        cfg: the configuration.
        algorithm: the name that checkpoints are stamped with.
        directory: the run directory.
        components: what a checkpoint holds, by name.
        counters: further components that are the same in all processes.
        size: iterations of the whole run, and environment steps of each.
        env: the environment, whose observations are noted down for later errors about widths. Default: none.

    Examples:
        ``edenrl.training.Run`` uses one.
    """

    def __init__(
        self,
        cfg: RunConfig,
        algorithm: str,
        directory: Path,
        components: Mapping[str, Any],
        counters: Mapping[str, Any],
        size: tuple[int, int],
        env: EnvBase | None = None,
    ) -> None:
        self.cfg, self.dir = cfg, directory
        self._components, self._env = components, env
        self._iterations, self._frames = size
        self._saved = 0
        self._leads = distributed.rank() == 0
        self._lock = DirectoryLock(directory)
        self._logger: Any = _Silent()
        self._progress: Any = _Silent()
        # What training keeps equal in all processes is saved once, everything else for each of them.
        shared = (nn.Module, torch.optim.Optimizer, GradientStep)
        everything = {**components, "rng": GlobalRNGState()}
        own = {name: component for name, component in everything.items() if not isinstance(component, shared)}
        self._own = {name: distributed.PerProcess(component) for name, component in own.items()}
        self.checkpoints = Checkpoints(
            directory / "checkpoints",
            {**components, **counters, **self._own},
            algorithm=algorithm,
            keep_last=cfg.checkpoint.keep_last,
            best_metric=cfg.evaluation.metric,
            best_mode=cfg.evaluation.mode,
        )

    @property
    def rate(self) -> float:
        """Steps per second since this process began; NaN in a process that does not measure it."""
        return float(self._progress.rate) if self._leads else math.nan

    def acquire(self) -> None:
        """Creates the directory and keeps other processes out; refuses what cannot be resumed.

        Raises:
            FileExistsError: for a new run in a directory that holds one.
            BlockingIOError: when another process trains there.
            ValueError: for settings, or a number of processes, that a resumed run cannot change.
        """
        if self.cfg.resume is None and self._leads and (self.dir / "config.json").exists():
            raise FileExistsError(
                f"{self.dir} already holds a run. Continue it with --resume {self.dir}, or choose another --run_dir."
            )
        if self._leads:
            with disk_space(self.dir, "the run directory"):
                self.dir.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
        # Until the first process holds the directory it may be another run's, in which nobody leaves a report.
        distributed.from_first(None)
        try:
            self._refuse_resume()
        except BaseException:  # no fault of the run: no report in its directory
            self._lock.release()
            raise

    def _refuse_resume(self) -> None:
        if self.cfg.resume is None:
            return
        config = self.dir / "config.json"
        path, metadata = self.checkpoints.manifest(self.cfg.resume_checkpoint) or (None, {})
        restart = self.cfg.resume_schedule == "restart"
        if config.exists():
            written = load_config(type(self.cfg), config)
            refuse_changes(written, self.cfg, str(config))
            if "config" in metadata:
                trained = type(self.cfg).model_validate(metadata["config"])
                refuse_changes(trained, written, str(config), edited=True, restart=restart)
        done, asked = metadata.get("step", 0), self._iterations
        if done > asked:
            raise ValueError(
                f"{self.dir} has done {done} iterations ({metadata['frames']:,} steps) and is asked for {asked}. To "
                "train it further, ask for more (--total_frames)."
            )
        present = distributed.world_size()
        saved = present if path is None else metadata.get("processes", 1)
        if saved != present:
            how = f"torchrun --nproc_per_node {saved}" if saved > 1 else "python, without torchrun"
            raise ValueError(
                f"{path} was saved by {saved} process(es), this run has {present}: environments and random states "
                f"belong to their process. Resume it with {how}."
            )

    def restore(self) -> bool:
        """Loads the checkpoint that a resumed run continues from; returns whether there was one."""
        if self._leads:
            self.checkpoints.sweep()
        resumed: bool = distributed.from_first(self.cfg.resume is not None and has_checkpoint(self.dir))
        if resumed:
            try:
                self.checkpoints.load(self.checkpoints.find(self.cfg.resume_checkpoint))
            except CheckpointError as error:
                if self._env is None:
                    raise
                changed = changed_observations(self.dir, describe_observations(self._env))
                raise type(error)(f"{error}{changed}") from error
        return resumed

    def open_outputs(self, iteration: int, unit: str) -> None:
        """Writes ``config.json`` and the observations, and opens metrics and progress.

        Args:
            iteration: iterations that are done; later rows of an interrupted run are dropped.
            unit: what is counted, such as "frames".
        """
        self._saved = iteration
        if not self._leads:
            return
        cfg = self.cfg
        # Where the run lies is not part of it: the file must fit a moved run, and a new run that starts from it.
        once: dict[str, Any] = {"resume": None, "run_dir": None}
        once |= {"resume_checkpoint": "latest", "resume_schedule": "restore"}
        save_config(cfg.model_copy(update=once), self.dir / "config.json")
        for report in self.dir.glob("error*.txt"):
            report.unlink()
        with disk_space(self.dir, "metrics.csv"):
            self._logger = RunLogger(
                self.dir,
                kind=cfg.logger.kind,
                first=iteration,
                name=self.dir.name,
                project=cfg.logger.project,
                wandb_mode=cfg.logger.wandb_mode,
                config=cfg.model_dump(mode="json"),
            )
        path = self.dir / "progress.json"
        total, done = self._iterations * self._frames, iteration * self._frames
        self._progress = Progress(path, total, done, quiet=cfg.quiet, shown=_SHOWN, unit=unit)
        if self._env is not None:
            save_observations(self.dir, describe_observations(self._env))
        if gap := iteration - self._logger.table.rows:
            self.say(
                f"{self._logger.table.path} lacks {gap} of the {iteration} rows so far: curves will have a gap there. "
                "The training itself is not affected."
            )

    def say(self, text: str) -> None:
        """Prints one line, unless the run is quiet."""
        self._progress.say(text)

    @property
    def _is_gone(self) -> bool:
        """Whether the directory was removed or renamed; what is written later may have created another one."""
        return self._leads and not (self.dir / "config.json").exists()

    def _gone(self) -> FileNotFoundError:
        return FileNotFoundError(
            f"The run directory {self.dir} is gone: it was removed or renamed during the training, and its config.json "
            "is not there any more. The training ends; nothing is saved in a new directory of that name."
        )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuses to write into a directory that is gone, and names it where it vanishes meanwhile."""
        if self._is_gone:
            raise self._gone()
        try:
            yield
        except Exception as error:
            if self._is_gone:
                raise self._gone() from error
            raise

    def write(self, iteration: int, row: Mapping[str, float]) -> None:
        """Adds the row of an iteration to ``metrics.csv`` and the other logger.

        Args:
            iteration: iterations that are done, this one included.
            row: its metrics; the steps that are done are added.

        Raises:
            FileNotFoundError: if the run directory is gone.
        """
        with self._writing(), disk_space(self.dir, "metrics.csv"):
            self._logger.write(iteration - 1, {"frames": iteration * self._frames, **row})

    def rescue(self, error: Exception, iteration: int) -> None:
        """Saves what a run has trained since its last checkpoint, before an error ends it. Never raises.

        It says why it does not save a state that is not sound.

        Args:
            error: what ends the run.
            iteration: iterations that are done.
        """
        # The other processes do not take part: each of them may be anywhere in its iteration.
        if isinstance(error, DiskFullError) or distributed.world_size() > 1 or iteration == self._saved:
            return
        if has_lost_workers(self._components) or self._is_gone:
            return
        try:
            for name, component in self._own.items():
                if not _is_sound(component.state_dict()):
                    raise FloatingPointError(f"the state of {name!r} holds NaN.")
            self.save(iteration, None)
            self.say(f"Saved the state after iteration {iteration} in {self.checkpoints.latest()}.")
        except Exception as problem:  # the error that ends the run is the one to report
            self.say(f"The iterations since the last checkpoint are not saved: {problem}")

    def show(self, iteration: int, row: Mapping[str, float]) -> None:
        """Updates the progress line and ``progress.json`` after so many iterations."""
        self._progress.update(iteration * self._frames, row)

    def save(self, iteration: int, evaluation: Mapping[str, float] | None) -> None:
        """Saves a checkpoint. All processes call it.

        Args:
            iteration: iterations that are done.
            evaluation: what the policy of this checkpoint has scored; None: it was not evaluated.

        Raises:
            FileNotFoundError: if the run directory is gone.
            ValueError: if the evaluation lacks ``cfg.evaluation.metric``; the checkpoint is saved first.
        """
        for component in self._own.values():
            component.collect()
        if not self._leads:
            return
        name = self.cfg.evaluation.metric
        score = math.nan if evaluation is None else evaluation.get(name, math.nan)
        metric = {} if math.isnan(score) else {name: score}
        frames, processes, config = iteration * self._frames, distributed.world_size(), self.cfg.model_dump(mode="json")
        with self._writing():
            self.checkpoints.save(iteration, frames=frames, processes=processes, config=config, **metric)
        self._saved = iteration
        # Only now: a mistyped name must not cost the iterations up to here.
        if evaluation is not None and name not in evaluation:
            raise ValueError(
                f"evaluation.metric is {name!r}; this evaluation measures {sorted(evaluation)}. Nothing is lost: "
                f"continue with --resume {self.dir} --evaluation.metric NAME."
            )

    def close(self, state: str, error: BaseException | None, iteration: int) -> None:
        """Closes the outputs, leaves a report of the error if there is one, and frees the directory.

        Args:
            state: what ``progress.json`` says from now on: "complete", "interrupted" or "failed".
            error: what ended the run.
            iteration: iterations that are done.

        Raises:
            FileNotFoundError: if the run directory is gone and no error is reported already.
        """
        self._progress.close(None if self._is_gone else state)
        try:
            with disk_space(self.dir, "metrics.csv"):
                self._logger.close()
            if self._is_gone:
                raise self._gone()
        except Exception:
            if error is None:  # of two errors the first is the one to report
                raise
        finally:
            if error is not None:
                save_error(error, self.dir, f"iteration {iteration} of {self._iterations}")
            self._lock.release()
