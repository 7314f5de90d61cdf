"""Runs an exported policy with NumPy and onnxruntime alone.

The file imports nothing else of edenrl, so that it can also be copied beside a robot's own code and used from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["RuntimePolicy", "load_policy"]

_SPEC_FILE = "policy_spec.json"
_SCHEMA_VERSION = 1


def load_policy(folder: str | Path, *, threads: int = 1) -> RuntimePolicy:
    """Loads the ONNX graph of an exported policy after checking it against its spec.

    Args:
        folder: what ``export_policy`` wrote, or a copy of its ``policy_spec.json`` and ``policy.onnx``.
        threads: threads of one inference. One is fastest for control-sized networks and leaves the others alone.

    Raises:
        FileNotFoundError: if the folder holds no export, or the graph that its spec names is missing.
        ImportError: if onnxruntime is not installed or cannot be imported.
        ValueError: if the spec is unreadable or of another version, names no ONNX graph, or does not belong to the
            graph beside it (another sha256, other tensors).

    Examples:
        >>> load_policy("nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: nowhere holds no exported policy: it has no policy_spec.json. Export one with export_policy.
    """
    path = Path(folder) / _SPEC_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no exported policy: it has no {_SPEC_FILE}. Export one with export_policy."
        )
    # Links are followed once: spec and graph then come from one export, even when a newer one is moved in meanwhile.
    path = path.resolve()
    spec = _read_spec(path, folder)
    graph = _read_graph(path.parent, spec, folder)
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":  # it is there; something that it imports is not
            raise _broken_onnxruntime(error) from error
        raise ImportError("load_policy needs onnxruntime, which is not installed: pip install onnxruntime") from None
    except Exception as error:  # a damaged installation fails in many ways
        raise _broken_onnxruntime(error) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # From the bytes and not from the file, which may have been replaced since they were checked.
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return RuntimePolicy(spec, session)


def _broken_onnxruntime(error: Exception) -> ImportError:
    return ImportError(
        f"load_policy needs onnxruntime, which is installed but cannot be imported ({type(error).__name__}: {error}). "
        "Mend or reinstall it."
    )


def _read_spec(path: Path, folder: str | Path) -> dict[str, Any]:
    """The content of a spec file whose version this loader reads; ``folder`` is named in errors."""
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
        version = spec["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}/{_SPEC_FILE} is not a policy spec: {error!r}. Export the policy again.") from None
    if version != _SCHEMA_VERSION:
        raise ValueError(
            f"{folder}/{_SPEC_FILE} has schema_version {version!r}; this loader reads {_SCHEMA_VERSION}. Export the "
            "policy again, or use the edenrl version that wrote it."
        )
    return spec


def _read_graph(parent: Path, spec: dict[str, Any], folder: str | Path) -> bytes:
    """The bytes of the ONNX graph beside a spec, whose hash the spec states; ``folder`` is named in errors."""
    files = {entry["format"]: entry for entry in spec["model"]["files"]}
    if "onnx" not in files:
        raise ValueError(f"{folder} was exported as {sorted(files)} only; export it with the format 'onnx' as well.")
    graph = parent / files["onnx"]["file"]
    if not graph.is_file():
        raise FileNotFoundError(f"{folder} lacks {graph.name}, which {_SPEC_FILE} names. Copy both files together.")
    content = graph.read_bytes()
    found, stated = hashlib.sha256(content).hexdigest(), files["onnx"]["sha256"]
    if found != stated:
        raise ValueError(
            f"{folder}/{graph.name} and {_SPEC_FILE} do not belong together: the file's sha256 is {found}, the spec "
            f"says {stated}. One of them was edited or replaced; export the policy again."
        )
    return content


class _Stack:
    """The last frames of one group, stacked as the ``history`` of its spec says."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.key, self.history = group["key"], group["history"]
        self.width = group["width"] // self.history["frames"]
        self.frames: np.ndarray | None = None  # [batch, frames, width], oldest first
        self.fresh = np.zeros(0, np.bool_)

    def reset(self, rows: Any = None) -> None:
        """Makes the next frame the first of an episode, for all rows or some."""
        if rows is None:
            self.frames = None
        elif self.frames is not None:
            self.fresh[rows] = True

    def check(self, frame: np.ndarray) -> None:
        """Raises for frames that ``push`` cannot add."""
        if frame.ndim != 2:
            raise ValueError(
                f"Frames of {self.key!r} have the shape {frame.shape}; expected [{self.width}] or "
                f"[batch, {self.width}]."
            )
        if frame.shape[-1] != self.width:
            raise ValueError(f"A frame of {self.key!r} has {self.width} features; {frame.shape[-1]} were given.")
        if self.history["at_reset"] is None:
            raise ValueError(
                f"The spec does not say how the history of {self.key!r} begins (at_reset is null). Stack its "
                f"{self.history['frames']} frames yourself, {_words(self.history['order'])}, as the training did."
            )
        if self.frames is not None and len(frame) != len(self.frames):
            raise ValueError(
                f"{len(frame)} frames were given and the history of {self.key!r} has {len(self.frames)} rows. Call "
                "reset() before the number of rows changes."
            )
        if not (finite := np.isfinite(frame)).all():
            row, feature = np.argwhere(~finite)[0].tolist()
            raise ValueError(
                f"The frame of {self.key!r} is not finite: in row {row} feature [{feature}] is {frame[row, feature]}. "
                "No history was changed."
            )

    def push(self, frame: np.ndarray) -> np.ndarray:
        """Adds the frames ``[batch, width]`` of one control step and returns the stacks ``[batch, frames * width]``."""
        count = self.history["frames"]
        if self.frames is None:
            self.frames = np.zeros((len(frame), count, self.width), np.float32)
            self.fresh = np.ones(len(frame), np.bool_)
        self.frames = np.concatenate([self.frames[:, 1:], frame[:, None]], 1)
        before = frame[self.fresh, None] if self.history["at_reset"] == "repeat" else 0.0
        self.frames[self.fresh, : count - 1] = before
        self.fresh[:] = False
        ordered = self.frames if self.history["order"] == "oldest_first" else self.frames[:, ::-1]
        return ordered.reshape(len(frame), -1).copy()


def _words(order: str) -> str:
    return order.replace("_", " ")


class RuntimePolicy:
    """An exported policy: observations in, deterministic actions out, recurrent state kept inside.

    Actions are what the network says, before the environment's treatment: the spec's ``actions`` tells how to clip,
    scale and shift them.

    Args:
        spec: the content of ``policy_spec.json``.
        session: an ``onnxruntime.InferenceSession`` of its graph.

    Attributes:
        spec: the content of ``policy_spec.json``.
        width: width of one observation.
        groups: where each group begins and ends in an observation.
        state: recurrent state by input name, empty before the first call and for a policy without state.

    Examples:
        ``policy = load_policy("runs/.../policy")``, ``policy.reset()`` when an episode begins, then in the control loop
        ``actions = policy(observation)``. If the policy reads histories,
        ``actions = policy(policy.observe({"prop": frame}))`` stacks them.
    """

    def __init__(self, spec: dict[str, Any], session: Any) -> None:
        self.spec, self._session = spec, session
        self._states: dict[str, list[Any]] = {entry["name"]: entry["shape"] for entry in spec["model"]["inputs"][1:]}
        self._outputs: list[str] = [entry["name"] for entry in spec["model"]["outputs"]]
        self.groups: dict[str, tuple[int, int]] = {o["key"]: (o["start"], o["stop"]) for o in spec["observations"]}
        self.width = int(spec["observations"][-1]["stop"])
        self.state: dict[str, np.ndarray] = {}
        # Files of earlier versions lack the entry.
        self._stacks = {o["key"]: _Stack(o) for o in spec["observations"] if o.get("history")}
        for side, entries in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
            in_graph = {e.name: [d if isinstance(d, int) else "batch" for d in e.shape] for e in entries}
            in_spec = {e["name"]: e["shape"] for e in spec["model"][side]}
            if in_graph != in_spec:
                raise ValueError(
                    f"The graph's {side} are {in_graph}, the spec says {in_spec}. Export the policy again."
                )

    def reset(self, rows: Any = None) -> None:
        """Begins episodes in all rows, or those of a mask or index list: zeroes recurrent states, empties histories."""
        for stack in self._stacks.values():
            stack.reset(rows)
        if rows is None:
            self.state = {}
            return
        for name, value in self.state.items():
            np.moveaxis(value, self._states[name].index("batch"), 0)[rows] = 0.0

    def observe(self, frames: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Stacks the histories that the policy reads; call it exactly once in a control step, after ``reset()``.

        Args:
            frames: the current frame of each group, ``[width]`` or ``[batch, width]``. A history takes the frame that
                stands under its own name, or else under the name of the group whose frames it stacks (``frame_of``).

        Returns:
            The groups of the policy, to call it with; those without a history as they were given.

        Raises:
            KeyError: if a group or a frame is missing.
            ValueError: for a frame of another width or that is not finite, another number of rows than before, or a
                spec that does not say how a history begins. The histories are then as before.
        """
        out = {key: np.asarray(frames[key], np.float32) for key in self.groups if key in frames}
        self._require_groups({**out, **self._stacks})
        newest: dict[str, np.ndarray] = {}
        for key, stack in self._stacks.items():
            source = key if key in frames else stack.history["frame_of"]
            if source not in frames:
                names = " or ".join(repr(name) for name in (key, stack.history["frame_of"]) if name is not None)
                raise KeyError(f"The history {key!r} needs a frame under {names}; {sorted(frames)} were given.")
            newest[key] = np.asarray(frames[source], np.float32)
            stack.check(np.atleast_2d(newest[key]))
        # Only now, so that a frame that is refused changes no history.
        for key, frame in newest.items():
            stacked = self._stacks[key].push(np.atleast_2d(frame))
            out[key] = stacked[0] if frame.ndim == 1 else stacked
        return out

    def __call__(self, obs: Any) -> np.ndarray:
        """Computes actions and advances the recurrent state.

        Args:
            obs: un-normalized observations ``[width]`` or ``[batch, width]``, the groups of the spec concatenated in
                its order; or a mapping from group to array, put in order here. Histories are whole: ``observe`` stacks
                them.

        Returns:
            Actions ``[dim]`` or ``[batch, dim]``, float32; for a discrete policy the index, ``[]`` or ``[batch]``.

        Raises:
            KeyError: if a group of a mapping is missing.
            ValueError: for another width, another number of rows than the recurrent state has, or a feature that is
                NaN or infinite (naming it).
        """
        array = self._concatenate(obs) if isinstance(obs, Mapping) else np.asarray(obs, dtype=np.float32)
        if array.ndim not in (1, 2) or array.shape[-1] != self.width:
            raise ValueError(
                f"Observations have shape {array.shape}; expected [{self.width}] or [batch, {self.width}], made of "
                f"{ {key: stop - start for key, (start, stop) in self.groups.items()} } in this order."
                f"{self._about_histories()}"
            )
        if not np.isfinite(array).all():
            self._refuse_not_finite(np.atleast_2d(array))
        outputs = self.run(np.ascontiguousarray(np.atleast_2d(array)))
        return outputs[0] if array.ndim == 1 else outputs

    def run(self, obs: np.ndarray) -> np.ndarray:
        """As a call, without checks of the observations ``[batch, width]`` (float32, contiguous)."""
        if self._states and not self.state:
            self.state = {
                name: np.zeros([len(obs) if d == "batch" else d for d in shape], np.float32)
                for name, shape in self._states.items()
            }
        for name, value in self.state.items():
            rows = value.shape[self._states[name].index("batch")]
            if rows != len(obs):
                raise ValueError(
                    f"{len(obs)} observations were given and the recurrent state has {rows} rows. Call reset() before "
                    "the number of rows changes."
                )
        actions, *state = self._session.run(self._outputs, {"obs": obs, **self.state})
        self.state = dict(zip(self._states, state, strict=True))
        return actions

    def _refuse_not_finite(self, obs: np.ndarray) -> None:
        """Raises for the features of ``[batch, width]`` that are NaN or infinite, by name."""
        row = int(np.flatnonzero(~np.isfinite(obs).all(-1))[0])
        names = self._feature_names()
        wrong = {names[i]: float(obs[row, i]) for i in np.flatnonzero(~np.isfinite(obs[row]))}
        shown = ", ".join(f"{name} is {value}" for name, value in list(wrong.items())[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"The observation of row {row} is not finite: {shown}{more}. Nothing was computed and the recurrent state "
            "is as before."
        )

    def _feature_names(self) -> list[str]:
        """The name of every feature of an observation, such as "observation/goal position[1]"."""
        names: list[str] = []
        for group in self.spec["observations"]:
            frames = (group.get("history") or {"frames": 1})["frames"]
            one = [f"{t['name']}[{i}]" for t in group["terms"] for i in range(t["width"])]
            one = one or [f"[{i}]" for i in range(group["width"] // frames)]
            for frame in range(frames):
                where = f"{group['key']}/" if frames == 1 else f"{group['key']}/frame {frame}/"
                names += [where + name for name in one]
        return names

    def _require_groups(self, groups: Mapping[str, Any]) -> None:
        if missing := [key for key in self.groups if key not in groups]:
            raise KeyError(f"The policy reads the groups {list(self.groups)}; {missing} were not given.")

    def _concatenate(self, groups: Mapping[str, Any]) -> np.ndarray:
        self._require_groups(groups)
        arrays = [np.asarray(groups[key], dtype=np.float32) for key in self.groups]
        widths = [array.shape[-1] if array.ndim else 0 for array in arrays]
        expected = [stop - start for start, stop in self.groups.values()]
        if widths != expected:
            raise ValueError(
                f"The groups {list(self.groups)} have the widths {widths}; the policy was exported with {expected}."
                f"{self._about_histories()}"
            )
        return np.concatenate(arrays, axis=-1)

    def _about_histories(self) -> str:
        """Says which groups are stacks of frames, for the message about a wrong width."""
        parts = [
            f"{key!r} holds {stack.history['frames']} frames of {stack.width}, {_words(stack.history['order'])}"
            for key, stack in self._stacks.items()
        ]
        return f" {', '.join(parts)}: observe() stacks them." if parts else ""

    def unusual(self, obs: Any, limit: float = 10.0) -> dict[str, float]:
        """Finds features far outside what training saw: a wrong unit, sign or order, before it moves a robot.

        Args:
            obs: one observation ``[width]``, or a mapping from group to array.
            limit: distance from the training mean that is still usual, in standard deviations.

        Returns:
            The distance of each unusual feature, by name (such as "observation/goal position[1]"). Empty when all are
            usual, or when the spec has no statistics.
        """
        obs = np.asarray(self._concatenate(obs) if isinstance(obs, Mapping) else obs, dtype=np.float64)
        if obs.shape != (self.width,):
            raise ValueError(f"One observation [{self.width}] can be judged at a time; got the shape {obs.shape}.")
        out: dict[str, float] = {}
        names = self._feature_names()
        for group in self.spec["observations"]:
            if group["mean"] is None:
                continue
            start, stop = group["start"], group["stop"]
            distances = np.abs(obs[start:stop] - group["mean"]) / (np.asarray(group["std"]) + 1e-2)
            # "not <=" keeps NaN, which no comparison finds.
            out |= {n: float(d) for n, d in zip(names[start:stop], distances, strict=True) if not d <= limit}
        return out

    def latency(self, calls: int = 1000) -> dict[str, float]:
        """Measures calls at batch 1 on this machine, on zeros; the recurrent state is reset before and after.

        Returns:
            ``p50`` and ``p99`` in microseconds.
        """
        obs, seconds = np.zeros(self.width, np.float32), np.empty(calls)
        self.reset()
        for _ in range(10):
            self(obs)
        for i in range(calls):
            began = time.perf_counter()
            self(obs)
            seconds[i] = time.perf_counter() - began
        self.reset()
        return {"p50": float(np.quantile(seconds, 0.5) * 1e6), "p99": float(np.quantile(seconds, 0.99) * 1e6)}
