"""A trot in closed form: reference motion for adversarial motion priors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edenrl.envs.quadruped.model import DEFAULT_POSE, FOOT_RADIUS, JOINT_NAMES, LINK

__all__ = ["save_trot_clips", "trot_clip"]

_HIP_HEIGHT = 0.29  # m
_FOOT_X = -0.0225  # m from the hip: the middle of the stance
_PHASES = np.array([0.0, 0.5, 0.5, 0.0])  # FL, FR, RL, RR


def trot_clip(
    seconds: float = 4.0, *, speed: float = 0.6, frequency: float = 2.0, clearance: float = 0.06, fps: float = 50.0
) -> np.ndarray:
    """Joint angles of a trot: diagonal legs swing together, each foot is on the ground half of the time.

    On the ground a foot moves backward at the trunk's ``speed``, so that it does not slip; in the air it swings forward
    along a sine and rises by ``clearance``. The angles follow from the legs' inverse kinematics. It is a reference, not
    a controller: replayed open loop as joint targets the legs sag, and the robot does not walk.

    Args:
        seconds: length.
        speed: of the trunk, forward, in m/s.
        frequency: strides per second.
        clearance: height of the swing in m.
        fps: frames per second.

    Returns:
        ``[round(seconds * fps), 12]`` in rad, in the order of ``JOINT_NAMES``.

    Raises:
        ValueError: a number that is not positive (the speed may be zero), or steps the legs cannot reach.

    Examples:
        >>> from edenrl.envs.quadruped import trot_clip
        >>> trot_clip(2.0).shape
        (100, 12)
    """
    if min(seconds, frequency, fps) <= 0 or clearance < 0:
        raise ValueError(
            f"seconds={seconds}, frequency={frequency}, fps={fps}, clearance={clearance} were given; expected positive "
            "numbers."
        )
    time = np.arange(round(seconds * fps)) / fps
    phase = (frequency * time[:, None] + _PHASES) % 1.0
    stride = speed / (2.0 * frequency)
    stance = phase < 0.5
    u = np.where(stance, 2.0 * phase, 2.0 * phase - 1.0)
    x = _FOOT_X + np.where(stance, stride / 2 - stride * u, -stride / 2 * np.cos(np.pi * u))
    z = -(_HIP_HEIGHT - FOOT_RADIUS) + np.where(stance, 0.0, clearance * np.sin(np.pi * u) ** 2)
    reach = np.square(x) + np.square(z)
    if reach.max() >= (2 * LINK) ** 2:
        raise ValueError(
            f"speed={speed} at frequency={frequency} takes strides of {stride:.2f} m, which the legs cannot reach; use "
            "a lower speed or a higher frequency."
        )
    knee = -np.arccos((reach - 2 * LINK**2) / (2 * LINK**2))
    hip = np.arctan2(-x, -z) - knee / 2
    return np.stack([np.zeros_like(hip), hip, knee], -1).reshape(len(time), 12)


def save_trot_clips(
    path: str | Path,
    speeds: Sequence[float] = (0.4, 0.6, 0.8, 1.0),
    seconds: float = 4.0,
    fps: float = 50.0,
    standing: bool = True,
) -> None:
    """Write trots of several speeds, and standing, as a motion bundle.

    The ``.npz`` holds ``motion_0``, ``motion_1``, ... ``[T, 12]``, ``fps``, ``num_motions``, ``joint_names`` and
    ``speeds``; ``motion_0`` stands still, unless ``standing`` is False.

    Args:
        path: file to write; its name ends in ``.npz``.
        speeds: in m/s; each becomes a clip, at 2 strides per second or as many as its speed needs.
        seconds: length of each clip.
        fps: frames per second.
        standing: begin with a clip of the robot standing still. Default True.

    Raises:
        ValueError: a file name that does not end in ``.npz``.

    Examples:
        >>> import tempfile, numpy as np
        >>> from pathlib import Path
        >>> from edenrl.envs.quadruped import save_trot_clips
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_trot_clips(Path(folder) / "trot.npz", speeds=(0.6,))
        ...     data = np.load(Path(folder) / "trot.npz")
        ...     print(int(data["num_motions"]), data["motion_1"].shape)
        2 (200, 12)
    """
    if Path(path).suffix != ".npz":
        raise ValueError(f"{path} was given; expected a file name that ends in .npz.")
    clips = [np.tile(DEFAULT_POSE, (round(seconds * fps), 1))] if standing else []
    clips += [trot_clip(seconds, speed=speed, frequency=max(2.0, 2.5 * speed), fps=fps) for speed in speeds]
    entries: dict[str, Any] = {f"motion_{index}": clip.astype(np.float32) for index, clip in enumerate(clips)}
    entries |= {"fps": np.float32(fps), "num_motions": np.int64(len(clips)), "joint_names": np.array(JOINT_NAMES)}
    stood = [0.0] if standing else []
    np.savez(path, **entries, speeds=np.array([*stood, *speeds], dtype=np.float32))
