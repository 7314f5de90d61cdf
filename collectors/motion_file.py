"""Reading recorded motion from a file, with every entry checked."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

__all__ = ["read_motion_file"]


def read_motion_file(path: Path) -> tuple[list[np.ndarray], float, list[str] | None]:
    """Reads and checks a motion file; pickled content is never loaded.

    Returns:
        Clips ``[frames, width]`` as float32, frames per second, and the names of the columns if the file has any.

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
        return clips, fps, _names(bundle, clips[0].shape[1], path)


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


def _names(bundle: Mapping[str, np.ndarray], width: int, path: Path) -> list[str] | None:
    if "joint_names" not in bundle:
        return None
    entry = _entry(bundle, "joint_names", path)
    names = [str(name) for name in entry.ravel()]
    if entry.dtype.kind != "U" or len(names) != width or len(set(names)) != width:
        raise ValueError(f"{path}: joint_names is {names}; expected {width} different names, one a column.")
    return names
