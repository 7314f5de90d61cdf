"""The folder of a run's checkpoints: which there are, which is meant, and which are intact."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl.checkpoint import Checkpoint, CheckpointError, CheckpointRotation

from edenrl._files import about_checkpoint, about_rsl_rl
from edenrl.training.checkpoint_files import DamagedCheckpointError, check_checkpoint

__all__ = [
    "Rotation",
    "damage_of",
    "find_checkpoint",
    "has_checkpoint",
    "naming_intact_ones",
    "reading",
    "require_run",
]


class Rotation(CheckpointRotation):
    """The checkpoints of a run.

    It lets a checkpoint go without the metric (an interrupted run is not evaluated): it is then never the best.
    """

    def _validate_metric(self, metadata: Mapping[str, Any]) -> None:
        if self.keep_best is not None and self.keep_best[0] in metadata:
            super()._validate_metric(metadata)

    def all_paths(self, after: int = -1) -> list[Path]:
        """Every folder that is named as a checkpoint, damaged ones too; the newest comes first.

        Args:
            after: only those of later steps. Default: all.
        """
        found = self.directory.glob(f"{self.prefix}-*") if self.directory.is_dir() else []
        steps = {path: path.name.removeprefix(f"{self.prefix}-") for path in found}
        named = {path: int(step) for path, step in steps.items() if step.isdigit()}
        return sorted((path for path, step in named.items() if step > after), key=lambda path: -named[path])

    def save(self, checkpoint: Checkpoint, *, step: int, **options: Any) -> Path:
        """Saves a checkpoint and drops those that are no longer kept, and those of later steps.

        The run has left these behind: it went on from an older one. They would push the new one out.
        """
        self._step = step
        return super().save(checkpoint, step=step, **options)

    def prune(self) -> tuple[Path, ...]:
        """Removes what ``save`` says. The new checkpoint is complete by now."""
        left_behind = self.all_paths(after=self._step)
        for path in left_behind:
            self._remove_atomically(path)
        return (*left_behind, *super().prune())

    def intact(self) -> list[str]:
        """Names of the checkpoints whose files are as they were written."""
        return [path.name for path in self.all_paths() if damage_of(path) is None]


def damage_of(path: Path) -> DamagedCheckpointError | None:
    """What is damaged in a checkpoint; None for an intact one."""
    try:
        check_checkpoint(path)
    except DamagedCheckpointError as error:
        return error
    return None


def _best(rotation: Rotation) -> Path | None:
    """The best checkpoint of a run (the newest if none was evaluated), of those whose manifests can be read."""
    newest = rotation.latest()
    if newest is None:
        return None
    unread = set(rotation.all_paths()) - set(rotation.checkpoints())
    if unread:
        warnings.warn(f"{damage_of(min(unread))} The best of the other checkpoints is used.", stacklevel=4)
    # Runs of the first versions do not say what "best" means; it was this.
    metric, mode = Checkpoint.manifest(newest)["metadata"].get("best", ("return_mean", "max"))
    return Rotation(rotation.directory, keep_last=1, keep_best=(metric, mode)).best() or newest


@contextlib.contextmanager
def naming_intact_ones(directory: Path) -> Iterator[None]:
    """Adds the checkpoints of a folder that are intact to errors about one that is damaged."""
    try:
        yield
    except DamagedCheckpointError as error:
        intact = ", ".join(Rotation(directory, keep_last=1).intact())
        raise DamagedCheckpointError(f"{error} Intact are: {intact or 'none'}. Give one of these instead.") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Adds the folder to errors about checkpoints that have no checksums, whose files may be damaged."""
    try:
        yield
    except CheckpointError as error:
        if Checkpoint.manifest(path)["metadata"].get("sealed"):
            raise
        raise CheckpointError(
            f"{path} cannot be loaded: {error} It was saved without checksums, so its files may be damaged. To use an "
            "older checkpoint of the run, move this one away."
        ) from error


def has_checkpoint(run_dir: str | Path) -> bool:
    """Whether a run directory holds a checkpoint, be it damaged.

    Examples:
        >>> has_checkpoint("no-such-run")
        False
    """
    return bool(Rotation(Path(run_dir) / "checkpoints", keep_last=1).all_paths())


def require_run(run_dir: str | Path) -> None:
    """Refuses what is no run directory.

    Raises:
        FileNotFoundError: saying what it is instead.

    Examples:
        >>> require_run("no-such-run")
        Traceback (most recent call last):
        ...
        FileNotFoundError: no-such-run: no such directory; give the directory of a run.
    """
    path = Path(run_dir).expanduser()
    if (path / "config.json").is_file():
        return
    if about := about_rsl_rl(path) or about_checkpoint(path):
        raise FileNotFoundError(about)
    if not path.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such directory; give the directory of a run.")
    raise FileNotFoundError(f"{run_dir} is not a run directory: it has no config.json.")


def find_checkpoint(run_dir: str | Path, which: str) -> Path:
    """The path of a run's checkpoint; whether it is intact is not looked at.

    Args:
        run_dir: the run directory.
        which: as for ``load_weights``.

    Raises:
        FileNotFoundError: for what is no run, a run without checkpoints, or without the one that was named (listing
            what there is).

    Examples:
        >>> find_checkpoint("no-such-run", "best")
        Traceback (most recent call last):
        ...
        FileNotFoundError: no-such-run: no such directory; give the directory of a run.
    """
    rotation = Rotation(Path(run_dir) / "checkpoints", keep_last=1)
    if which in ("best", "latest"):
        path = next(iter(rotation.all_paths()), None)
        if which == "best":
            path = _best(rotation) or path
    else:
        given = Path(which).expanduser()
        places = (given, rotation.directory / given)
        path = next((p for p in places if Checkpoint.is_checkpoint(p) or p in rotation.all_paths()), None)
        if path is None:
            if about := about_rsl_rl(given):
                raise FileNotFoundError(about)
            there = ", ".join(sorted(p.name for p in rotation.directory.glob(f"{rotation.prefix}-*"))) or "nothing"
            raise FileNotFoundError(
                f"{which} is no checkpoint, neither as a path nor in {rotation.directory}, which holds {there}. Give "
                "one of these, 'best' or 'latest'."
            )
    if path is None:
        require_run(run_dir)
        raise FileNotFoundError(f"{run_dir} has no checkpoint yet: the run was stopped before its first one.")
    return path
