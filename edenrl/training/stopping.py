"""The end of a run: Ctrl-C, SIGTERM, a closed terminal, a launcher that is gone; and of the processes it started."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from edenrl import distributed

__all__ = ["StopRequest", "has_lost_workers", "shut_down"]

# A terminal sends Ctrl-C to every process, and torchrun then passes it on once more: within this many seconds both are
# one press of the keys.
_ONE_PRESS = 2.0


class StopRequest:
    """Remembers that somebody asked for the end, so that a run can finish its iteration first.

    The first SIGINT, SIGTERM or SIGHUP (a closed terminal or SSH connection) sets ``reason``. The second raises
    ``KeyboardInterrupt`` at once.

    Args:
        say: prints one line for the user.

    Examples:
        >>> stop = StopRequest(print)
        >>> stop.catch_signals()
        >>> stop.reason is None
        True
        >>> stop.release_signals()
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.reason: str | None = None
        self._say = say
        self._asked = -math.inf
        self._handlers: dict[int, Any] = {}
        self._parent = os.getppid()

    def catch_signals(self) -> None:
        """Replaces the handlers of these signals; a SIGHUP that ``nohup`` ignores stays ignored."""
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is None or (name == "SIGHUP" and signal.getsignal(number) == signal.SIG_IGN):
                continue
            # Only the main thread may install handlers; elsewhere Ctrl-C keeps its default meaning.
            with contextlib.suppress(ValueError):
                self._handlers[number] = signal.signal(number, self._on_signal)

    def release_signals(self, *, ignore: bool = False) -> None:
        """Puts the earlier handlers back, or ignores the signals from here on."""
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if ignore else handler)
        self._handlers.clear()

    def check_launcher(self) -> None:
        """Asks for the end when ``torchrun`` was killed: nobody else would end these processes."""
        if self.reason is None and distributed.world_size() > 1 and os.getppid() != self._parent:
            self.reason = "end of the launcher"
            self._say("torchrun has ended: stopping after this iteration.")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            if distributed.world_size() > 1 and time.monotonic() - self._asked < _ONE_PRESS:
                return
            raise KeyboardInterrupt
        self.reason, self._asked = signal.Signals(number).name, time.monotonic()
        self._say("Stopping after this iteration; once more to stop at once.")


def has_lost_workers(components: Mapping[str, Any]) -> bool:
    """Whether a process of a collector among the components is gone: it could not be asked for its state."""
    workers = [worker for component in components.values() for worker in getattr(component, "procs", ())]
    # TorchRL closes the ones that it ends, and those cannot be asked whether they live.
    return any(worker._closed or not worker.is_alive() for worker in workers)


def shut_down(components: Mapping[str, Any], error: BaseException | None) -> None:
    """Shuts the collectors among the components down.

    Args:
        components: the parts of a run.
        error: what ended the run. Of two errors it is the one to report.
    """
    for component in components.values():
        if not hasattr(component, "shutdown"):
            continue
        try:
            component.shutdown()
        except Exception:
            if error is None:
                raise
