"""What a person sees while a run goes on, and what is left on disk for programs."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from edenrl._files import write_atomic

__all__ = ["Progress", "format_table", "print_line"]

_log = logging.getLogger("edenrl")

_SECONDS_PER_LINE = 10.0
_SECONDS_PER_FILE = 1.0
_EPISODES = 100
# What a line says of the updates, and the word for it; a bar has no room for it.
_UPDATES = {"loss": "loss", "kl": "KL", "lr": "lr"}


def format_table(rows: Mapping[str, Any], title: str = "") -> str:
    """Two aligned columns.

    Examples:
        >>> print(format_table({"frames": 1000, "return": "12.5"}))
        frames  1000
        return  12.5
    """
    width = max(map(len, rows), default=0)
    body = [f"{name.ljust(width)}  {value}" for name, value in rows.items()]
    return "\n".join([title, "-" * len(title), *body] if title else body)


def print_line(text: str) -> None:
    """Prints a line for whoever still reads it: a closed pipe, terminal or full disk behind it ends nothing."""
    try:
        print(text, flush=True)
    except (OSError, ValueError):
        _write_nowhere(sys.stdout)


def _write_nowhere(stream: Any) -> None:
    """Leads a stream that nobody reads into the void. Python writes to it once more when it exits, and would fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _RecentEpisodes:
    """Means over the episodes that ended last: those of as few iterations as ended at least a hundred together.

    A single iteration is no measure: the first episodes that end are the short ones, and many iterations end none. The
    window is for people. It is in no checkpoint and starts empty when a run is resumed.
    """

    def __init__(self) -> None:
        self._rows: deque[dict[str, float]] = deque()
        self.count = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds an iteration's metrics: ``episode/count``, and means over so many episodes."""
        row = {name: value for name, value in metrics.items() if name.startswith("episode/")}
        if not row.get("episode/count", 0.0) > 0:
            return
        self._rows.append(row)
        self.count += row["episode/count"]
        while self.count - self._rows[0]["episode/count"] >= _EPISODES:
            self.count -= self._rows.popleft()["episode/count"]

    def mean(self, name: str) -> float:
        """Mean of ``episode/...`` over the episodes that have it; NaN where none has."""
        pairs = [(row["episode/count"], row.get(name, math.nan)) for row in self._rows]
        known = [(count, value) for count, value in pairs if not math.isnan(value)]
        total = sum(count for count, _ in known)
        return sum(count * value for count, value in known) / total if known else math.nan


class Progress:
    """A bar on a terminal, a plain line now and then elsewhere, nothing when quiet; and ``progress.json``.

    Args:
        path: ``progress.json``, replaced atomically at most once a second: step, total, rate (frames per second),
            eta_seconds, elapsed_seconds, state and the last metrics.
        total: frames of the whole run.
        done: frames done before this process started.
        quiet: show nothing (the file is still written).
        shown: metrics worth a person's glance, by column name and label. Those called ``episode/...`` are means over
            the last finished episodes, at least 100 once there are so many, and their number stands behind them.
        unit: what is counted, "frames" by default.
    """

    def __init__(
        self,
        path: Path,
        total: int,
        done: int = 0,
        *,
        quiet: bool = False,
        shown: Mapping[str, str] | None = None,
        unit: str = "frames",
    ) -> None:
        self.path, self.total, self.done, self.start = path, total, done, done
        self.quiet, self.shown, self.unit = quiet, shown or {}, unit
        self.bar = None
        if not quiet and sys.stderr.isatty():
            # Some pseudo-terminals report no size, and tqdm then draws nothing.
            wide = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            self.bar = tqdm(
                total=total,
                initial=done,
                unit=unit.removesuffix("s"),
                unit_scale=True,
                dynamic_ncols=wide,
                ncols=None if wide else 100,
                nrows=None if wide else 25,
            )
        self._began = time.monotonic()
        self._wrote_line = self._wrote_file = -math.inf
        self._failed = False
        self.last: dict[str, float] = {}
        self._recent = _RecentEpisodes()

    @property
    def rate(self) -> float:
        """Frames per second of this process."""
        return (self.done - self.start) / max(time.monotonic() - self._began, 1e-9)

    def update(self, done: int, metrics: Mapping[str, float]) -> None:
        """Shows the state after an iteration; metrics that are NaN keep their last value."""
        new, self.done = done - self.done, done
        self.last.update({name: value for name, value in metrics.items() if not math.isnan(value)})
        self._recent.add(metrics)
        now = time.monotonic()
        if self.bar is not None:
            self._on_bar(lambda bar: (bar.set_postfix_str(self._glance(), refresh=False), bar.update(new)))
        elif not self.quiet and now - self._wrote_line >= _SECONDS_PER_LINE:
            self._wrote_line = now
            left = _duration((self.total - done) / max(self.rate, 1e-9))
            where = f"{done:,} / {self.total:,} {self.unit}, {self.rate:,.0f}/s, {left} left"
            print_line(", ".join(part for part in (where, self._glance(), self._labelled(_UPDATES)) if part))
        if now - self._wrote_file >= _SECONDS_PER_FILE:
            self._wrote_file = now
            self.write("running")

    def _glance(self) -> str:
        means = {name: self._recent.mean(name) for name in self.shown}
        episodes = [f"{self.shown[name]} {mean:.4g}" for name, mean in means.items() if not math.isnan(mean)]
        if episodes:
            episodes[-1] += f" (last {self._recent.count:.0f} episodes)"
        rest = self._labelled({name: label for name, label in self.shown.items() if math.isnan(means[name])})
        return ", ".join([*episodes, rest] if rest else episodes)

    def _labelled(self, shown: Mapping[str, str]) -> str:
        return ", ".join(f"{label} {self.last[name]:.4g}" for name, label in shown.items() if name in self.last)

    def say(self, text: str) -> None:
        """Prints a line without tearing the bar."""
        if self.quiet:
            return
        if self.bar is not None:
            self._on_bar(lambda bar: bar.write(text))
        else:
            print_line(text)

    def _on_bar(self, draw: Callable[[tqdm], Any]) -> None:
        """Draws on the bar; a terminal that is gone ends the bar and not the run."""
        try:
            draw(self.bar)
        except (OSError, ValueError):
            _write_nowhere(sys.stderr)
            _write_nowhere(sys.stdout)
            self.bar = None
            self.quiet = True

    def write(self, state: str) -> None:
        """Writes ``progress.json`` now."""
        rate = self.rate
        content = {
            "state": state,
            "step": self.done,
            "total": self.total,
            "rate": round(rate, 1),
            "eta_seconds": round((self.total - self.done) / rate, 1) if rate > 0 else None,
            "elapsed_seconds": round(time.monotonic() - self._began, 1),
            "metrics": self.last,
        }
        text = json.dumps(content, indent=2) + "\n"
        try:
            write_atomic(self.path, text)
        except OSError as error:
            if not self._failed:
                _log.warning("%s could not be written (%s); training goes on.", self.path, error)
            self._failed = True
            _overwrite(self.path, text)

    def close(self, state: str | None) -> None:
        """Ends the bar and leaves the final state on disk, unless it is None."""
        if self.bar is not None:
            self._on_bar(lambda bar: bar.close())
        if state is not None:
            self.write(state)


def _overwrite(path: Path, text: str) -> None:
    """Writes over a file, if there is one: on a full disk its own blocks still take a text of about the same length."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        file.write(text.encode())
        file.truncate()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
