"""Files that are replaced in one step, and files of others."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

__all__ = ["about_rsl_rl", "write_atomic"]

# What the runners of rsl_rl save: the first until its version 4, the second since.
_RSL_RL_KEYS = (b"model_state_dict", b"actor_state_dict")


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file's content: readers and crashes see the old or the new text, never a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
