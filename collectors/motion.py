"""Reference motion: windows of recorded clips."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.envs import EnvBase

from edenrl.collectors.motion_file import read_motion_file
from edenrl.collectors.resume import simulator_of
from edenrl.envs.seeds import checked_seed

__all__ = ["MotionDataset"]

_log = logging.getLogger("edenrl")

_AT_ONCE = 8192  # windows that are compared with the references at a time


def _distances(windows: Tensor, references: Tensor) -> Tensor:
    # The default computes large batches by a matrix product, which loses most digits of small distances.
    return torch.cdist(windows, references, compute_mode="donot_use_mm_for_euclid_dist")


class MotionDataset:
    """Windows of consecutive frames from recorded motion clips, between the recorded frames as well.

    The file is an ``.npz`` with ``num_motions``, ``fps`` and the clips ``motion_0``, ``motion_1``, ... ``[T_i, f]``.
    It may also hold:

    - ``joint_names``, one for each of the f columns;
    - ``angles``, bool ``[f]``: True for columns that are angles in rad. Their jumps of a full turn are removed, so that
      frames between the recorded ones lie on the short way. Angles then go on beyond pi, as those of a joint do;
    - ``quaternions``, int ``[n, 4]``: the columns of each unit quaternion, in the order w, x, y, z. The norm is
      checked, signs are made to agree along a clip, and blends are brought back to unit norm;
    - ``weights`` ``[num_motions]``: how often each clip is drawn, relative to the others. Default: all alike.

    The position of a window of K frames is its base b, a real-valued frame index. If a step is one recorded frame, the
    window consists of frames ``b - (K - 2), ..., b, b + 1``, oldest first. Each is interpolated linearly between its
    two recorded neighbours. ``sample`` draws a clip by its weight, then b uniformly over all windows inside the clip.

    Everything is checked when the file is read; ``match`` checks it against an environment. Pickled content is never
    loaded. Samples are drawn from the data set's own generator. ``state_dict`` holds the state of the generator and a
    digest of the clips, so that a run continues bit for bit, and is refused on other clips.

    Args:
        path: the file.
        num_frames: frames K of a window, at least 2. Default 5.
        dt: seconds between the frames of a window. Default: one recorded frame, 1 / fps.
        seed: seed of the generator. Default 0.
        device: where windows are made. Default CPU.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is not of this format, or a clip is missing, has another width, is no matrix of real
            numbers, holds NaN or infinity, or is shorter than K + 2 steps. The message names file and clip.

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
        file = read_motion_file(self.path)
        clips, self.fps, self.joint_names = file.clips, file.fps, file.joint_names
        self._quaternions = file.quaternions
        self.num_motions, self.frame_dim = len(clips), clips[0].shape[1]
        self._lengths = torch.tensor([len(clip) for clip in clips], device=self.device)
        self._offsets = self._lengths.cumsum(0) - self._lengths
        frames = np.concatenate(clips)
        content = frames.tobytes() + str(self._lengths.tolist()).encode()
        self._weights: Tensor | None = None
        if file.weights is not None:
            self._weights = torch.from_numpy(file.weights).to(self.device)
            content += file.weights.tobytes()
        self._digest = hashlib.sha256(content).hexdigest()
        self._frames = torch.from_numpy(frames).to(self.device)
        self.generator = torch.Generator(self.device).manual_seed(checked_seed(seed))
        self.dt = 1.0 / self.fps
        self._require_length()  # at the recorded rate, before another one is asked for
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
        """Range of the base: its smallest value, the same for all clips, and its end ``[num_motions]``, exclusive."""
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
        innermost environment are optional. ``amp_joint_names`` names the f entries of a frame; if the file has names,
        too, its columns are reordered to match. ``control_dt`` is the length of a control step in seconds; the frames
        of a window must have this spacing.

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
        simulator = simulator_of(env)
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
        if wanted is not None and self.joint_names is None:
            _log.warning(
                "%s has no joint_names, so the order of its columns cannot be checked; they are taken to be those of "
                "%s, %s. Save the names, one a column, as the entry joint_names.",
                self.path,
                env,
                list(wanted),
            )
        if wanted is None or self.joint_names is None or list(wanted) == self.joint_names:
            return
        missing = [name for name in wanted if name not in self.joint_names]
        extra = [name for name in self.joint_names if name not in wanted]
        if missing or extra:
            raise ValueError(
                f"{self.path}: joint_names lacks {missing} and has {extra}, which {env} does not; expected the names "
                f"{list(wanted)} in any order."
            )
        order = [self.joint_names.index(name) for name in wanted]
        self._frames = self._frames[:, order]
        self._quaternions = [[order.index(column) for column in columns] for columns in self._quaternions]
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
        if self._weights is None:
            clip = torch.randint(self.num_motions, (batch,), generator=self.generator, device=self.device)
        elif batch:
            clip = torch.multinomial(self._weights, batch, replacement=True, generator=self.generator)
        else:
            clip = torch.zeros(0, dtype=torch.int64, device=self.device)
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
        outside = ~((base >= low) & (base < high[clip]))  # also NaN
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
        # Rounding may put a position onto the last frame or slightly behind it: then the last two are blended.
        last = (self._lengths[clip] - 2)[:, None]
        left = torch.minimum(position.floor().long().clamp_min(0), last)
        index = self._offsets[clip][:, None] + left
        share = (position - left).to(self._frames.dtype).unsqueeze(-1)
        blend = torch.lerp(self._frames[index], self._frames[index + 1], share)
        for columns in self._quaternions:
            blend[..., columns] = torch.nn.functional.normalize(blend[..., columns], dim=-1)
        return blend

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
        # In parts: all distances at once, for a rollout of thousands of environments, would take gigabytes.
        parts = windows.reshape(-1, self.window_dim).split(_AT_ONCE)
        nearest = torch.cat([_distances(part, references).amin(-1) for part in parts])
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
