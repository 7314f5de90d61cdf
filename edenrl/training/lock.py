"""The lock that keeps a second process out of a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: two processes in one run directory go unnoticed
    fcntl = None  # type: ignore[assignment]

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Holds a run directory for this process; the system releases it however the process ends.

    Args:
        directory: an existing directory.

    Raises:
        BlockingIOError: from ``acquire`` while another process holds the directory.

    Examples:
        >>> import tempfile
        >>> lock = DirectoryLock(Path(tempfile.mkdtemp()))
        >>> lock.acquire()
        >>> lock.release()
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / ".lock"
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the lock or raises."""
        while self._file is None:
            file = open(self.path, "w")
            if fcntl is None:
                self._file = file
                return
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its owner may have removed the file between the two calls above. Such a lock would keep nobody out.
                if os.path.samestat(os.fstat(file.fileno()), self.path.stat()):
                    self._file = file
                    return
            except FileNotFoundError:
                pass
            except BlockingIOError:
                file.close()
                raise BlockingIOError(
                    f"Another process is training in {self.path.parent}. Wait for it or stop it, or choose another "
                    "--run_dir."
                ) from None
            file.close()

    def release(self) -> None:
        """Gives the lock up; without one it does nothing."""
        if self._file is not None:
            # Removed while it is held: afterwards it could be another process's.
            self.path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
