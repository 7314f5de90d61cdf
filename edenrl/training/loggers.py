"""Metrics on disk, always; TensorBoard and wandb beside them, never in the way."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edenrl._files import write_atomic

__all__ = ["MetricsTable", "RunLogger", "read_metrics"]

_log = logging.getLogger("edenrl")


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Reads a ``metrics.csv``; empty cells are left out of their row, a half-written last line is dropped."""
    with open(path, newline="", encoding="utf-8") as file:
        text = file.read()
    complete = text[: text.rfind("\n") + 1]
    rows = []
    for row in csv.DictReader(io.StringIO(complete)):
        try:
            rows.append({name: float(cell) for name, cell in row.items() if name and cell})
        except (TypeError, ValueError):
            continue
    return rows


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

    Rows are flushed as they come. A metric that first appears later adds a column (the file is rewritten atomically).

    Args:
        path: the file; continued when it exists.
        first: rows of this iteration and later are dropped (a resumed run writes them again).

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
        self.rows = (
            [row for row in read_metrics(path) if row.get("iteration", math.inf) < first] if path.exists() else []
        )
        # From the header: a column may be empty in every row that is kept.
        self.columns = _header(path) if self.rows else []
        self._file: Any = None
        if self.rows:
            self._rewrite()
        elif path.exists():
            path.unlink()

    def write(self, row: Mapping[str, float]) -> None:
        """Appends a row; NaN becomes an empty cell."""
        kept = {name: float(value) for name, value in row.items() if not math.isnan(value)}
        self.rows.append(kept)
        fresh = [name for name in row if name not in self.columns]
        if fresh or self._file is None:
            self.columns += fresh
            self._rewrite()
        else:
            csv.writer(self._file).writerow([self._cell(kept, name) for name in self.columns])
            self._file.flush()

    @staticmethod
    def _cell(row: Mapping[str, float], name: str) -> str:
        value = row.get(name)
        return "" if value is None else str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)

    def _rewrite(self) -> None:
        self.close()
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(self.columns)
        writer.writerows([self._cell(row, name) for name in self.columns] for row in self.rows)
        write_atomic(self.path, buffer.getvalue())
        self._file = open(self.path, "a", newline="", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class RunLogger:
    """``metrics.csv`` plus, when asked, one of TorchRL's loggers.

    A logger that fails never stops training: its errors are counted and the first is reported. wandb without a network
    or an account falls back to offline and says so once.

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
        if kind == "tensorboard":
            self.logger = self._start(lambda: _tensorboard(run_dir), "tensorboard", 'pip install "edenrl[tensorboard]"')
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
            self._guard(lambda: self.logger.log_metrics(finite, step=iteration))

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


def _tensorboard(run_dir: Path) -> Any:
    from torchrl.record.loggers import TensorboardLogger

    return TensorboardLogger(exp_name="tensorboard", log_dir=str(run_dir))


def _wandb(run_dir: Path, name: str, project: str, *, offline: bool) -> Any:
    import wandb
    from torchrl.record.loggers.wandb import WandbLogger

    return WandbLogger(
        exp_name=name,
        offline=offline,
        save_dir=str(run_dir),
        project=project,
        log_env_packages=False,
        mode="offline" if offline else "online",
        settings=wandb.Settings(init_timeout=20, silent=True),
    )
