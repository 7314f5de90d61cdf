"""Files that are replaced in one step, disks that are full, and files of others."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["DiskFullError", "about_rsl_rl", "disk_space", "format_bytes", "write_atomic"]

# Windows has no quotas of this kind.
_NO_SPACE = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))

# What the runners of rsl_rl save: the first until its version 4, the second since.
_RSL_RL_KEYS = (b"model_state_dict", b"actor_state_dict")


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file's content: readers and crashes see the old or the new text, never a part of it.

    Raises:
        DiskFullError: if the disk is full; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_space(path.parent, path.name):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class DiskFullError(OSError):
    """There is not enough disk space for what is to be written."""


@contextlib.contextmanager
def disk_space(folder: Path, what: str, needed: int = 0, advice: str = "Free some space.") -> Iterator[None]:
    """Refuses to begin writing where the space does not suffice, and explains it when the space runs out on the way.

    Args:
        folder: where the files go; it need not exist yet.
        what: what is written, for the message, such as "the checkpoint".
        needed: bytes that will be written at least. Default: unknown.
        advice: last part of the message.

    Raises:
        DiskFullError: with the folder, the bytes needed and the bytes free.
    """

    def usage() -> Any:
        return shutil.disk_usage(next(path for path in [folder, *folder.resolve().parents] if path.exists()))

    def full() -> DiskFullError:
        size = f" needs {format_bytes(needed)}," if needed else " could not be written,"
        free = format_bytes(usage().free)
        return DiskFullError(f"The disk of {folder} is full: {what}{size} {free} are free. {advice}")

    # Small files are written in every iteration: they ask for nothing beforehand. Some network drives report no size.
    if needed and usage().total and needed > usage().free:
        raise full()
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not _is_disk_full(error):
            raise
        raise full() from error


def _is_disk_full(error: BaseException | None) -> bool:
    """Whether a missing block or a quota is the reason; torch raises errors of its own while it handles that one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        error = error.__cause__ or error.__context__
    return False


def format_bytes(number: float) -> str:
    """Bytes for people.

    Examples:
        >>> format_bytes(512), format_bytes(3_500_000)
        ('512 bytes', '3.5 MB')
    """
    if number < 1000:
        return f"{int(number)} bytes"
    for unit in ("kB", "MB", "GB"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} TB"


def about_checkpoint(path: str | Path) -> str | None:
    """What to give in place of a checkpoint that was given as a run, or of the folder of checkpoints."""
    path = Path(path).expanduser().absolute()
    for folder in (path.parent, path):
        if folder.name == "checkpoints" and (folder.parent / "config.json").is_file():
            return f"{path} lies inside a run; give the run, {folder.parent}, and the checkpoint by its name"
    return None


def about_rsl_rl(path: str | Path) -> str | None:
    """What to do with a checkpoint of rsl_rl, or a folder of them, that was given as a run; None for anything else.

    Nothing is unpickled: the names in the file are enough.
    """
    path = Path(path).expanduser()
    found = sorted(path.glob("model_*.pt"))[-1:] if path.is_dir() else [path]
    for file in found:
        if key := _rsl_rl_key(file):
            return (
                f"{file} is a file of rsl_rl (a torch file with {key!r}), no run of this library: it holds neither the "
                "configuration nor the environment, and its tensors have other names. Train here on the same "
                "environment (edenrl.envs.VecEnvAdapter), or build the policy with edenrl.modules.make_actor, with the "
                f"same layers, and copy the tensors of torch.load(file)[{key!r}] into it yourself."
            )
    return None


def _rsl_rl_key(file: Path) -> str | None:
    """The entry by which a torch file is one of rsl_rl."""
    try:
        with zipfile.ZipFile(file) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            content = archive.read(pickles[0]) if pickles else b""
    except (OSError, zipfile.BadZipFile):
        return None
    return next((key.decode() for key in _RSL_RL_KEYS if key in content), None)
