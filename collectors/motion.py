"""Reference motion, and the policy's windows that it is compared with."""

from __future__ import annotations

import hashlib
import logging
import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer, TensorStorage
from torchrl.envs import EnvBase, TransformedEnv

__all__ = ["MotionDataset", "WindowBuffer"]

_log = logging.getLogger("edenrl")

_AT_ONCE = 8192


class MotionDataset:
    """Windows of consecutive frames from recorded motion clips, between the recorded frames as well.

    The file is an ``.npz`` with ``num_motions``, ``fps`` and the clips ``motion_0``, ``motion_1``, ... ``[T_i, f]``;
    and ``joint_names``, one for each of the f columns, if it has any. A window of K frames has a base b, a continuous
    frame index; with one frame per step its frames stand at ``b - (K - 2), ..., b, b + 1``, oldest first, each the
    linear blend of its two recorded neighbours. ``sample`` takes a clip uniformly, then b uniformly among those whose
    window lies within the clip; all clips in one gather.

    Everything is checked when the file is read, and again against an environment by ``match``. Pickled content is never
    loaded. Samples are drawn from a generator of the data set's own; ``state_dict`` holds its state and a digest of the
    clips, so that a run continues bit for bit and not on other clips.

    Args:
        path: the file.
        num_frames: frames K of a window, at least 2. Default 5.
        dt: seconds between the frames of a window. Default: one recorded frame, 1 / fps.
        seed: seed of the generator. Default 0.
        device: where windows are made. Default CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a file, or a clip that cannot be used (missing, of another width or not a matrix of real
            numbers, with NaN or infinity, shorter than K + 2 steps), naming file and clip.

    Source: Peng et al. 2021, "AMP", arXiv:2104.02180; windows as in the HUSKY humanoid skateboarding project.

    Examples:
        >>> import tempfile
        >>> from edenrl.envs.quadruped import save_trot_clips
        >>> path = Path(tempfile.mkdtemp()) / "trot.npz"
        >>> save_trot_clips(path, speeds=(0.4, 0.8))
        >>> motion = MotionDataset(path)
        >>> motion.num_motions, motion.frame_dim, motion.sample(32).shape
        (3, 12, torch.Size([32, 5, 12]))
    """

    def __init__(
        self,
        path: str | Path,
        num_frames: int = 5,
        *,
        dt: float | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_frames < 2 or dt is not None and not 0 < dt < math.inf:
            raise ValueError(f"MotionDataset needs num_frames >= 2 and dt > 0, got num_frames={num_frames}, dt={dt}.")
        self.path, self.num_frames, self.device = Path(path).expanduser(), num_frames, torch.device(device)
        clips, self.fps, self.joint_names = _read(self.path)
        self.num_motions, self.frame_dim = len(clips), clips[0].shape[1]
        self._lengths = torch.tensor([len(clip) for clip in clips], device=self.device)
        self._offsets = self._lengths.cumsum(0) - self._lengths
        frames = np.concatenate(clips)
        self._digest = hashlib.sha256(frames.tobytes() + str(self._lengths.tolist()).encode()).hexdigest()
        self._frames = torch.from_numpy(frames).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.dt = 1.0 / self.fps
        self._require_length()  # of the file as it is, before it is asked for steps of another length
        if dt is not None:
            self.dt = dt
            self._require_length()

    @property
    def window_dim(self) -> int:
        """Width K * f of a flattened window."""
        return self.num_frames * self.frame_dim

    @property
    def _stride(self) -> float:
        """Recorded frames per step of a window."""
        return self.dt * self.fps

    def _bounds(self) -> tuple[float, Tensor]:
        """Range of the base: the first one, the same for all clips, and the one past the last ``[num_motions]``."""
        return (self.num_frames - 2) * self._stride, self._lengths.double() - 1 - self._stride

    def _require_length(self) -> None:
        needed = math.ceil((self.num_frames + 1) * self._stride - 1e-6) + 1
        short = (self._lengths < needed).nonzero().flatten().tolist()
        if short:
            raise ValueError(
                f"{self.path}: motion_{short[0]} has {int(self._lengths[short[0]])} frames; windows of "
                f"{self.num_frames} frames, {self.dt:.4g} s apart at {self.fps:g} fps, need {needed}. Record longer "
                "clips or use fewer frames."
            )

    def match(
        self,
        env: EnvBase,
        *,
        window_key: str = "amp_window",
        gate_key: str = "amp_gate",
        resample: bool = False,
    ) -> MotionDataset:
        """Checks the clips against what an environment publishes, and orders their columns as it does.

        The environment publishes ``window_key`` ``[N, K * f]`` and ``gate_key`` ``[N, 1]``. Two attributes of the
        innermost environment are optional: ``amp_joint_names``, the names of the f entries of a frame, by which columns
        are mapped when the file has names, too; and ``control_dt``, the seconds of a control step, which the frames of
        a window must be apart.

        Args:
            env: the environment, transformed or not.
            window_key: default ``"amp_window"``.
            gate_key: default ``"amp_gate"``.
            resample: let windows step by ``control_dt`` where the file was recorded at another rate. Default False:
                such a file is refused.

        Returns:
            The data set itself.

        Raises:
            ValueError: keys, width, names or rate that do not fit, naming the file.
        """
        simulator: Any = env
        while isinstance(simulator, TransformedEnv):
            simulator = simulator.base_env
        published, name = list(env.observation_spec.keys()), type(simulator).__name__
        if missing := [key for key in (window_key, gate_key) if key not in published]:
            raise ValueError(
                f"{name} publishes {published} and not {missing}, which a motion prior reads. Add them to the "
                "environment (on the quadruped: 'amp' among --env.kwargs.groups)."
            )
        width = int(env.observation_spec[window_key].shape[-1])
        if width != self.window_dim:
            raise ValueError(
                f"{self.path}: motion_0 has frames of width {self.frame_dim}, in windows of {self.num_frames} frames "
                f"{self.window_dim} numbers; {name} publishes {window_key!r} with {width}. Record the frame that the "
                "environment publishes, or set the number of frames."
            )
        self._order_columns(getattr(simulator, "amp_joint_names", None), name)
        self._match_rate(getattr(simulator, "control_dt", None), name, resample)
        return self

    def _order_columns(self, wanted: Sequence[str] | None, env: str) -> None:
        if wanted is None or self.joint_names is None or list(wanted) == self.joint_names:
            return
        missing = [name for name in wanted if name not in self.joint_names]
        extra = [name for name in self.joint_names if name not in wanted]
        if missing or extra:
            raise ValueError(
                f"{self.path}: joint_names lacks {missing} and has {extra}, which {env} does not; expected the names "
                f"{list(wanted)} in any order."
            )
        self._frames = self._frames[:, [self.joint_names.index(name) for name in wanted]]
        self.joint_names = list(wanted)

    def _match_rate(self, control_dt: float | None, env: str, resample: bool) -> None:
        if control_dt is None:
            _log.warning(
                "%s does not say how long a control step is (control_dt); windows of %s are %.4g s a frame.",
                env,
                self.path,
                self.dt,
            )
            return
        if abs(control_dt / self.dt - 1) < 1e-3:
            return
        if not resample:
            raise ValueError(
                f"{self.path}: fps is {self.fps:g}, frames {self.dt:.4g} s apart; {env} takes control steps of "
                f"{control_dt:.4g} s ({1 / control_dt:g} per second). Record at that rate, or set resample to true to "
                "interpolate between the recorded frames."
            )
        self.dt = float(control_dt)
        self._require_length()

    def sample(self, batch: int) -> Tensor:
        """Random windows ``[batch, K, f]``."""
        clip = torch.randint(self.num_motions, (batch,), generator=self.generator, device=self.device)
        low, high = self._bounds()
        unit = torch.rand(batch, generator=self.generator, device=self.device, dtype=torch.float64)
        return self._gather(clip, low + (high[clip] - low) * unit)

    def windows(self, clip: Tensor, base: Tensor) -> Tensor:
        """The windows of given clips and bases.

        Args:
            clip: indices of clips ``[batch]``.
            base: continuous frame indices ``[batch]``; with one frame per step in [K - 2, T - 2).

        Returns:
            ``[batch, K, f]``, oldest frame first.

        Raises:
            ValueError: a base whose window does not lie within its clip.
        """
        low, high = self._bounds()
        outside = (base < low) | (base >= high[clip])
        if bool(outside.any()):
            row = int(outside.nonzero()[0])
            raise ValueError(
                f"base {float(base[row]):g} was given for motion_{int(clip[row])}; expected {low:g} up to but not "
                f"including {float(high[clip[row]]):g}."
            )
        return self._gather(clip, base.double())

    def _gather(self, clip: Tensor, base: Tensor) -> Tensor:
        steps = torch.arange(2 - self.num_frames, 2, device=self.device, dtype=torch.float64)
        position = base[:, None] + self._stride * steps
        # Rounding may bring a position onto the last frame or a hair outside; it is blended from the last two then.
        last = (self._lengths[clip] - 2)[:, None]
        left = torch.minimum(position.floor().long().clamp_min(0), last)
        index = self._offsets[clip][:, None] + left
        share = (position - left).to(self._frames.dtype).unsqueeze(-1)
        return torch.lerp(self._frames[index], self._frames[index + 1], share)

    def distance(self, windows: Tensor, *, max_references: int = 4096) -> Tensor:
        """How far windows are from the nearest window of the clips, whatever the phase.

        Args:
            windows: ``[*batch, K * f]``, in the units of the clips.
            max_references: how many windows of the clips stand for all, evenly spaced along them; at most four per
                frame.

        Returns:
            Root mean square over the K * f entries of the difference to the nearest one, ``[*batch]``.
        """
        low, high = self._bounds()
        ends = (high - low).cumsum(0)
        count = min(math.ceil(4 * float(ends[-1])), max_references)
        place = (torch.arange(count, device=self.device, dtype=torch.float64) + 0.5) / count * ends[-1]
        clip = torch.searchsorted(ends, place, right=True).clamp_max(self.num_motions - 1)
        base = low + place - (ends - (high - low))[clip]
        references = self._gather(clip, base).flatten(1)
        # In parts: of a rollout of thousands of environments, all distances at once take gigabytes.
        parts = windows.reshape(-1, self.window_dim).split(_AT_ONCE)
        nearest = torch.cat([torch.cdist(part, references).amin(-1) for part in parts])
        return (nearest / math.sqrt(self.window_dim)).reshape(windows.shape[:-1])

    def state_dict(self) -> dict[str, Any]:
        """The generator's state, a digest of the clips, and their rate."""
        return {"generator": self.generator.get_state(), "digest": self._digest, "fps": self.fps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``.

        Raises:
            ValueError: the state belongs to other clips.
        """
        if state["digest"] != self._digest or state.get("fps", self.fps) != self.fps:
            raise ValueError(
                f"{self.path} does not hold the clips that this run was trained on{self._rates(state)}. Give the "
                "original file, or start a new run with the new one."
            )
        self.generator.set_state(state["generator"].cpu())

    def _rates(self, state: Mapping[str, Any]) -> str:
        before = state.get("fps", self.fps)
        return "" if before == self.fps else f" (fps {before:g}, now {self.fps:g})"


class WindowBuffer(TensorDictReplayBuffer):
    """The last windows of the policy for which style counts: a ``TensorDictReplayBuffer`` that picks them itself.

    Samples have the windows under ``"amp_window"``. They are drawn from a generator of the buffer's own, whose state is
    part of ``state_dict``.

    Args:
        capacity: number of windows kept; the oldest make room.
        window_dim: width K * f of a window.
        batch_size: windows per sample.
        seed: seed of the generator. Default 0.
        device: where the windows are kept. Default CPU.

    Examples:
        >>> buffer = WindowBuffer(100, window_dim=15, batch_size=8)
        >>> step = {"amp_window": torch.randn(4, 6, 15), "amp_gate": torch.ones(4, 6, 1)}
        >>> buffer.add_rollout(TensorDict(next=step, batch_size=[4, 6])).shape, len(buffer)
        (torch.Size([24, 15]), 24)
        >>> buffer.sample()["amp_window"].shape
        torch.Size([8, 15])
    """

    def __init__(
        self, capacity: int, window_dim: int, batch_size: int, *, seed: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        # Allocated here and not on the first call, so that checkpoints have one layout from the start.
        rows = TensorDict(
            amp_window=torch.zeros(capacity, window_dim, device=device),
            index=torch.zeros(capacity, dtype=torch.int64, device=device),
            batch_size=[capacity],
        )
        super().__init__(storage=TensorStorage(rows, device=device), batch_size=batch_size)
        self.empty()
        self.capacity = capacity
        self.set_rng(torch.Generator(device).manual_seed(seed))

    def add_rollout(
        self,
        rollout: TensorDictBase,
        *,
        window_key: NestedKey = ("next", "amp_window"),
        gate_key: NestedKey = ("next", "amp_gate"),
        missing_key: NestedKey = ("next", "final_obs_missing"),
    ) -> Tensor:
        """Takes the windows after each step where the gate is open; returns them, ``[n, K * f]``.

        Windows at ends of episodes whose last observation the simulator does not give (marked by ``missing_key``) are
        left out.

        Args:
            rollout: data of any batch shape.
            window_key: windows ``[*batch, K * f]``.
            gate_key: gates ``[*batch, 1]``; open above 0.5.
            missing_key: marks ``[*batch, 1]``; optional.
        """
        counts = rollout.get(gate_key).squeeze(-1) > 0.5
        if (missing := rollout.get(missing_key, None)) is not None:
            counts = counts & ~missing.squeeze(-1)
        windows: Tensor = rollout.get(window_key)[counts]
        if len(kept := windows[-self.capacity :]):
            self.extend(TensorDict(amp_window=kept, batch_size=[len(kept)]))
        return windows

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores ``state_dict``."""
        state, device = state_dict["_rng"]
        super().load_state_dict({**state_dict, "_rng": (state.cpu(), device)})


def _read(path: Path) -> tuple[list[np.ndarray], float, list[str] | None]:
    """Clips as float32, frames per second and names of the columns."""
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
    if not (finite := np.isfinite(clip)).all():
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
