"""A folder whose files all change in one step.

``out_dir/policy.onnx`` and its siblings are links to ``out_dir/.export/current/policy.onnx``, and ``current`` is a link
to the folder of one export. ``current`` is replaced by one atomic rename. A process that is killed at any instant
therefore leaves the old export or the new one under every name, never a mix, and nothing needs to be repaired.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["publish", "staging"]

_STORE = ".export"


@contextmanager
def staging(out_dir: Path, names: Sequence[str]) -> Iterator[Path]:
    """Makes a new folder inside ``out_dir`` to prepare an export in, and the link that will become ``current``.

    Unless ``publish`` was called, both are removed at the end.

    Args:
        out_dir: created when missing.
        names: every file name that an export may hold.

    Raises:
        PermissionError: if ``out_dir`` cannot be written to, or its file system has no symbolic links.
        FileExistsError: if it holds files of these names that are not links of an export made here.
    """
    try:
        (out_dir / _STORE).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out_dir / _STORE))
        folder.chmod(0o755)
        os.symlink(folder.name, _link(folder))
    except OSError as error:
        raise PermissionError(
            f"{out_dir} cannot be written to, or has no symbolic links ({error.strerror}). Choose another folder to "
            "export into."
        ) from None
    try:
        if foreign := [n for n in names if os.path.lexists(out_dir / n) and not _is_ours(out_dir / n)]:
            raise FileExistsError(
                f"{out_dir} holds {foreign}, which were not exported there (a copy?). Remove them or choose another "
                "folder to export into."
            )
        yield folder
    finally:
        if _current(out_dir) != folder.name:
            _link(folder).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)


def publish(staged: Path, names: Sequence[str]) -> None:
    """Makes a prepared folder the export of its ``out_dir``.

    Args:
        staged: a folder of ``staging``, complete.
        names: every file name that an export may hold; those not in ``staged`` disappear.
    """
    store, out_dir = staged.parent, staged.parent.parent
    present = [name for name in names if (staged / name).exists()]
    for name in present:
        # Until "current" is replaced this link leads to the old export, which has no such file: it is broken.
        if not (out_dir / name).is_symlink():
            os.symlink(Path(_STORE, "current", name), out_dir / name)
    os.replace(_link(staged), store / "current")
    for name in set(names) - set(present):
        (out_dir / name).unlink(missing_ok=True)
    for leftover in store.iterdir():
        if leftover.name.endswith(".link"):
            leftover.unlink()
        elif leftover.name not in ("current", staged.name):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    return path.is_symlink() and Path(os.readlink(path)) == Path(_STORE, "current", path.name)


def _link(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.link")


def _current(out_dir: Path) -> str | None:
    link = out_dir / _STORE / "current"
    return os.readlink(link) if link.is_symlink() else None
