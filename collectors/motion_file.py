"""Reading recorded motion from a file, with every entry checked."""

from __future__ import annotations

import logging
import math
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["MotionFile", "read_motion_file"]

_TURN = 2 * math.pi
_log = logging.getLogger("edenrl")


@dataclass(frozen=True)
class MotionFile:
    """What a motion file holds."""

    clips: list[np.ndarray]
    """``[frames, width]`` each, float32; angles do not jump, quaternions do not change sign."""
    fps: float
    """Frames per second."""
    joint_names: list[str] | None
    """Names of the columns."""
    weights: np.ndarray | None
    """How often each clip is drawn, relative to the others."""
    quaternions: list[list[int]]
    """Columns of each quaternion, as w, x, y, z."""


def read_motion_file(path: Path) -> MotionFile:
    """Reads and checks a motion file; pickled content is never loaded.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what is wrong with it, naming file and entry.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such motion file; expected an .npz bundle with motion_0, fps and num_motions."
        )
    try:
        # Pickled content would run whatever it says.
        bundle = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a motion bundle (.npz): {error}") from None
    if not isinstance(bundle, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} holds one array; expected an .npz bundle with motion_0, fps and num_motions.")
    with bundle:
        fps = _number(bundle, "fps", path)
        count = _number(bundle, "num_motions", path)
        if not 0 < fps < math.inf:
            raise ValueError(f"{path}: fps is {fps:g}; expected the frames per second, a positive number.")
        if count < 1 or count != int(count):
            raise ValueError(f"{path}: num_motions is {count:g}; expected a whole number, at least 1.")
        names = [f"motion_{i}" for i in range(min(int(count), len(bundle.files) + 1))]
        if surplus := [key for key in bundle.files if key.startswith("motion_") and key not in names]:
            raise ValueError(
                f"{path}: num_motions is {int(count)}, but the file also has {surplus}. Correct num_motions."
            )
        clips = [_clip(bundle, name, path) for name in names]
        for name, clip in zip(names, clips, strict=True):
            if clip.shape[1] != clips[0].shape[1]:
                raise ValueError(
                    f"{path}: {name} has frames of width {clip.shape[1]}, motion_0 of {clips[0].shape[1]}; expected "
                    "one width."
                )
        width = clips[0].shape[1]
        quaternions = _quaternions(bundle, width, path)
        angles = _angles(bundle, width, path)
        _continue_angles(clips, angles, path)
        for name, clip in zip(names, clips, strict=True):
            for columns in quaternions:
                _continue_quaternion(clip, columns, f"{path}: {name}")
        weights = _weights(bundle, len(clips), path)
        return MotionFile(clips, fps, _names(bundle, width, path), weights, quaternions)


def _entry(bundle: Mapping[str, np.ndarray], key: str, path: Path) -> np.ndarray:
    if key not in bundle:
        raise ValueError(f"{path}: {key} is missing; the file has {sorted(bundle)}.")
    try:
        return bundle[key]
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path}: {key} cannot be read ({error}). Save plain arrays of numbers with numpy.savez."
        ) from None


def _number(bundle: Mapping[str, np.ndarray], key: str, path: Path) -> float:
    value = _entry(bundle, key, path)
    if value.size != 1 or value.dtype.kind not in "iuf":
        raise ValueError(f"{path}: {key} is {value.dtype} of shape {value.shape}; expected one number.")
    return float(value.reshape(()))


def _clip(bundle: Mapping[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    clip = _entry(bundle, name, path)
    if clip.ndim != 2 or clip.dtype.kind not in "iuf" or 0 in clip.shape:
        raise ValueError(
            f"{path}: {name} is {clip.dtype} of shape {clip.shape}; expected real numbers [frames, width]."
        )
    clip = np.ascontiguousarray(clip, dtype=np.float32)
    if not (finite := np.abs(clip) < 1e18).all():  # squares of larger numbers overflow; false for NaN
        frame, column = np.argwhere(~finite)[0].tolist()
        raise ValueError(f"{path}: {name} is not finite in frame {frame}, column {column}. Repair or remove the clip.")
    return clip


def _angles(bundle: Mapping[str, np.ndarray], width: int, path: Path) -> np.ndarray | None:
    if "angles" not in bundle:
        return None
    angles = _entry(bundle, "angles", path)
    if angles.dtype != bool or angles.shape != (width,):
        raise ValueError(
            f"{path}: angles is {angles.dtype} of shape {angles.shape}; expected bool [{width}], True for columns that "
            "are angles in rad."
        )
    return angles


def _continue_angles(clips: list[np.ndarray], angles: np.ndarray | None, path: Path) -> None:
    """Removes jumps of a full turn from the columns that are angles; warns of what looks like one elsewhere."""
    for i, clip in enumerate(clips):
        if angles is not None:
            # Turns are added, and nothing else: a clip without jumps keeps its bits.
            turns = np.round(np.diff(clip[:, angles].astype(np.float64), axis=0) / _TURN).cumsum(0)
            clip[1:, angles] -= (_TURN * turns).astype(np.float32)
            continue
        wrapped = (np.abs(clip) <= math.pi + 1e-3).all(0) & (np.abs(np.diff(clip, axis=0)) > 1.5 * math.pi).any(0)
        if wrapped.any():
            _log.warning(
                "%s: motion_%d jumps by about a full turn in column %d, and frames between the recorded ones are "
                "blended. If the column is an angle, say so: save the entry angles, bool [%d], True for angles in rad "
                "(all False if there are none).",
                path,
                i,
                int(np.flatnonzero(wrapped)[0]),
                clip.shape[1],
            )
            return


def _quaternions(bundle: Mapping[str, np.ndarray], width: int, path: Path) -> list[list[int]]:
    if "quaternions" not in bundle:
        return []
    entry = _entry(bundle, "quaternions", path)
    if not entry.size:
        return []
    inside = entry.dtype.kind in "iu" and entry.ndim == 2 and entry.shape[1] == 4
    if not inside or entry.min() < 0 or entry.max() >= width or len(np.unique(entry)) != entry.size:
        raise ValueError(
            f"{path}: quaternions is {entry.tolist()}; expected four different columns of the {width} for each "
            "quaternion, in the order w, x, y, z."
        )
    return [[int(column) for column in row] for row in entry]


def _continue_quaternion(clip: np.ndarray, columns: list[int], where: str) -> None:
    """Checks that a quaternion has unit norm, and turns signs so that neighbouring frames are close."""
    values = clip[:, columns].astype(np.float64)
    norms = np.linalg.norm(values, axis=1)
    if (wrong := np.abs(norms - 1) > 1e-2).any():
        frame = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"{where} has a quaternion of norm {norms[frame]:.4g} in frame {frame}, columns {columns}; expected unit "
            "norm, in the order w, x, y, z."
        )
    # q and -q are the same rotation.
    signs = np.where((values[1:] * values[:-1]).sum(1) < 0, -1, 1).cumprod()
    clip[1:, columns] *= signs[:, None].astype(np.float32)


def _weights(bundle: Mapping[str, np.ndarray], count: int, path: Path) -> np.ndarray | None:
    if "weights" not in bundle:
        return None
    weights = _entry(bundle, "weights", path)
    good = weights.dtype.kind in "iuf" and weights.shape == (count,) and np.isfinite(weights).all()
    if not good or weights.min() < 0 or weights.max() == 0:
        raise ValueError(
            f"{path}: weights is {weights.tolist()}; expected {count} numbers of at least 0, one a clip, and one above "
            "0."
        )
    return weights.astype(np.float64)


def _names(bundle: Mapping[str, np.ndarray], width: int, path: Path) -> list[str] | None:
    if "joint_names" not in bundle:
        return None
    entry = _entry(bundle, "joint_names", path)
    names = [str(name) for name in entry.ravel()]
    if entry.dtype.kind != "U" or len(names) != width or len(set(names)) != width:
        raise ValueError(f"{path}: joint_names is {names}; expected {width} different names, one a column.")
    return names
