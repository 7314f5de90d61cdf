"""Motion for a run: the user's file, or the trot that comes with the built-in robot."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from edenrl.collectors.motion import MotionDataset

__all__ = ["load_motion"]

_HAVE_A_TROT = ("Quadruped", "QuadrupedTerrain")


def load_motion(path: str | Path | None, env_name: str, num_frames: int = 5, **options: Any) -> MotionDataset:
    """The clips of a motion file; without a file the built-in trot, for the robots that have one.

    Args:
        path: a motion file (``.npz``), or None.
        env_name: name of the environment.
        num_frames: frames of a window.
        options: further options of ``MotionDataset``, such as ``seed`` and ``device``.

    Raises:
        ValueError: without a file, for an environment that has no built-in motion.

    Examples:
        >>> load_motion(None, "Quadruped").frame_dim
        12
    """
    if path is not None:
        return MotionDataset(path, num_frames, **options)
    if env_name.lower() not in map(str.lower, _HAVE_A_TROT):
        raise ValueError(f"There is no built-in motion for {env_name}: set --algorithm.motion FILE.npz.")
    from edenrl.envs.quadruped import save_trot_clips  # needs MuJoCo

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trot.npz"
        # Without a clip of standing: while the command is to stand, amp_gate is 0 and no style reward is given.
        save_trot_clips(file, standing=False)
        return MotionDataset(file, num_frames, **options)
