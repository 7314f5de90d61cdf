"""Metrics on disk, always; TensorBoard and wandb beside them, never in the way."""

from __future__ import annotations

import csv
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from edenrl._files import write_atomic

__all__ = ["MetricsTable", "RunLogger", "read_metrics"]

_log = logging.getLogger("edenrl")


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Reads a ``metrics.csv``; empty cells are left out of their row, a half-written last line is dropped."""
    return list(_rows(path))


def _rows(path: str | Path) -> Iterator[dict[str, float]]:
    """The rows of a ``metrics.csv``, one at a time."""
    with open(path, newline="", encoding="utf-8") as file:
        complete = (line for line in file if line.endswith("\n"))
        for row in csv.DictReader(complete):
            try:
                yield {name: float(cell) for name, cell in row.items() if name and cell}
            except (TypeError, ValueError):
                continue


def _header(path: Path) -> list[str]:
    with open(path, newline="", encoding="utf-8") as file:
        return next(csv.reader(file), [])


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name, as what TensorBoard's table of hyper-parameters can hold."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


class MetricsTable:
    """A CSV file with one row per iteration and one column per metric.

    Rows are flushed as they come, and none is kept in memory. A metric that first appears later adds a column: the file
    is copied row by row, and the copy replaces it atomically.

    Args:
        path: the file; continued when it exists.
        first: rows of this iteration and later are dropped (a resumed run writes them again).

    Attributes:
        rows: rows that the file held when it was opened.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> table = MetricsTable(path)
        >>> table.write({"iteration": 0, "loss": 0.5})
        >>> table.write({"iteration": 1, "loss": 0.25, "return": 3.0})
        >>> read_metrics(path)[1]["return"]
        3.0
    """

    def __init__(self, path: Path, first: int = 0) -> None:
        self.path = path
        self.columns: list[str] = []
        self._file: Any = None
        self.rows = 0
        if path.exists():
            # From the header: a column may be empty in every row that is kept.
            self.columns = _header(path)
            self.rows = self._rewrite(first)
            if not self.rows:
                self.close()
                self.columns = []
                path.unlink()

    def write(self, row: Mapping[str, float]) -> None:
        """Appends a row; NaN becomes an empty cell."""
        kept = {name: float(value) for name, value in row.items() if not math.isnan(value)}
        fresh = [name for name in row if name not in self.columns]
        if fresh or self._file is None:
            self.columns += fresh
            self._rewrite()
        csv.writer(self._file).writerow([self._cell(kept, name) for name in self.columns])
        self._file.flush()

    @staticmethod
    def _cell(row: Mapping[str, float], name: str) -> str:
        value = row.get(name)
        return "" if value is None else str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)

    def _rewrite(self, first: int | None = None) -> int:
        """Writes the file anew with all columns, without the rows of iteration `first` and later; counts its rows."""
        self.close()
        count = 0
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(self.columns)
                for row in _rows(self.path) if self.path.exists() else ():
                    if first is None or row.get("iteration", math.inf) < first:
                        writer.writerow([self._cell(row, name) for name in self.columns])
                        count += 1
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._file = open(self.path, "a", newline="", encoding="utf-8")
        return count

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class RunLogger:
    """``metrics.csv`` plus, when asked, one of TorchRL's loggers.

    A logger that fails never stops training: its errors are counted and the first is reported. wandb without a network
    or an account falls back to offline and says so once. A run that is resumed continues its curves: iterations that a
    crash made it repeat are shown once.

    Args:
        run_dir: where ``metrics.csv`` and the loggers' own files go.
        kind: "csv" (the table alone), "tensorboard" or "wandb".
        first: the first iteration that will be written.
        name: the run's name.
        project: wandb project.
        wandb_mode: "online", "offline" or "disabled".
        config: hyper-parameters shown by the logger.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        kind: str = "csv",
        first: int = 0,
        name: str = "run",
        project: str = "edenrl",
        wandb_mode: str = "online",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.table = MetricsTable(run_dir / "metrics.csv", first)
        self.errors = 0
        self.logger: Any = None
        # wandb drops a step that it has; without its own step it would add the row once more.
        self._options = {"override_global_step": True} if kind == "wandb" else {}
        if kind == "tensorboard":
            hint = 'pip install "edenrl[tensorboard]"'
            self.logger = self._start(lambda: _tensorboard(run_dir, first), "tensorboard", hint)
        elif kind == "wandb" and wandb_mode != "disabled":
            self.logger = self._start_wandb(run_dir, name, project, wandb_mode)
        elif kind not in ("csv", "wandb"):
            raise ValueError(f"Unknown logger {kind!r}; choose 'csv', 'tensorboard' or 'wandb'.")
        if self.logger is not None and config is not None:
            shown = _flat(config) if kind == "tensorboard" else dict(config)
            self._guard(lambda: self.logger.log_hparams(shown))

    def _start(self, build: Callable[[], Any], kind: str, hint: str) -> Any:
        try:
            return build()
        except ImportError:
            _log.warning("The %s logger is not installed (%s); metrics.csv is written as always.", kind, hint)
        except Exception as error:
            _log.warning("The %s logger did not start (%s); metrics.csv is written as always.", kind, _short(error))
        return None

    def _start_wandb(self, run_dir: Path, name: str, project: str, mode: str) -> Any:
        hint = 'pip install "edenrl[wandb]"'
        if mode == "online":
            try:
                return _wandb(run_dir, name, project, offline=False)
            except ImportError:
                pass
            except Exception as error:
                _log.warning(
                    "wandb is not reachable (%s); logging offline. Upload later with `wandb sync`.", _short(error)
                )
        return self._start(lambda: _wandb(run_dir, name, project, offline=True), "wandb", hint)

    def write(self, iteration: int, row: Mapping[str, float]) -> None:
        """Writes one iteration's scalars everywhere."""
        self.table.write({"iteration": iteration, **row})
        if self.logger is not None:
            finite = {key: value for key, value in row.items() if not math.isnan(value)}
            self._guard(lambda: self.logger.log_metrics(finite, step=iteration, **self._options))

    def _guard(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            self.errors += 1
            if self.errors == 1:
                _log.warning("The logger failed (%s); training goes on, metrics.csv is complete.", _short(error))

    def close(self) -> None:
        """Flushes and closes; reports how many calls of the external logger failed."""
        self.table.close()
        if self.logger is not None:
            self._guard(self.logger.close)
        if self.errors:
            _log.warning("%d call(s) to the logger failed; metrics.csv holds every scalar.", self.errors)


def _short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def _tensorboard(run_dir: Path, first: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter
    from torchrl.record.loggers import TensorboardLogger

    class Continued(TensorboardLogger):
        """Hides what an earlier process wrote of iteration `first` and later."""

        def _create_experiment(self) -> SummaryWriter:
            return SummaryWriter(log_dir=str(run_dir / "tensorboard"), purge_step=first)

    return Continued(exp_name="tensorboard", log_dir=str(run_dir))


def _wandb(run_dir: Path, name: str, project: str, *, offline: bool) -> Any:
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    return WandbLogger(
        exp_name=name,
        offline=offline,
        save_dir=str(run_dir),
        id=_wandb_id(run_dir),
        project=project,
        log_env_packages=False,
        mode="offline" if offline else "online",
        resume="allow",
        settings=wandb.Settings(init_timeout=20, silent=True),
    )


def _wandb_id(run_dir: Path) -> str:
    """The name of the run at wandb: drawn once, then read from the run directory."""
    path = run_dir / "wandb_id.txt"
    if not path.exists():
        write_atomic(path, f"{secrets.token_hex(4)}\n")
    return path.read_text(encoding="utf-8").strip()
