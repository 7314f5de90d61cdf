"""Writes a policy as files that run without torch, after checking that they compute the same."""

from __future__ import annotations

import copy
import datetime
import hashlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.export.contract import actions_of, contract_of, observations_of
from edenrl.export.folder import publish, staging
from edenrl.export.graph import PolicyGraph, State
from edenrl.export.runtime import load_policy
from edenrl.export.spec import ModelFile, ModelSpec, PolicySpec, Provenance, TensorInfo, Verification
from edenrl.modules import RunningNorm

__all__ = ["VerificationError", "check_formats", "export_policy"]

OPSET = 18
_STEPS, _TOLERANCE, _PROBES = 4, 1e-4, (1, 7)
_SPEC = "policy_spec.json"
# Computes (actions, next states) from obs and states, all on the CPU.
_Runner = Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]


class VerificationError(ValueError):
    """An exported graph computes something else than the policy; nothing was written."""


def export_policy(
    policy: TensorDictModuleBase,
    env: EnvBase,
    out_dir: str | Path,
    *,
    formats: Sequence[str] = ("onnx", "jit"),
    checkpoint: str | Path | None = None,
    task: str | None = None,
    verify: bool = True,
) -> dict[str, Path]:
    """Writes the deterministic policy and its contract into a folder.

    The graphs take ``obs``, the policy's observation groups concatenated in order and un-normalized, ``[batch, width]``
    float32, and give ``actions`` before the environment's clipping and scaling, for any batch size. A recurrent policy
    also takes and returns its state (``h_in``, ``c_in``, ``h_out``, ``c_out``, ``(layers, batch, hidden)``); in
    TorchScript it keeps it inside, with ``reset()``. ``policy_spec.json`` says the rest, see ``PolicySpec``.

    Everything is prepared inside ``out_dir``, compared with the policy on four real control steps of the environment
    and on random observations (absolute and relative tolerance 1e-4), and moved in at once: a failure or a kill at any
    instant leaves an earlier export as it was. The policy itself is copied and not touched; the environment is stepped.

    Args:
        policy: a TensorDict policy, see ``PolicyGraph`` for what it may be made of. Recurrent modules of TorchRL need
            neither primer nor ``InitTracker`` in the environment.
        env: the environment it was trained in, with the transforms that change observations or actions.
        out_dir: folder; created when missing. Needs symbolic links.
        formats: any of "onnx" (``policy.onnx``), "jit" (TorchScript, ``policy.pt``) and "pt2" (torch.export,
            ``policy.pt2``). A graph of another format that an earlier export left there is removed.
        checkpoint: where the weights come from, for the record; nothing is loaded.
        task: name of the environment, for the record.
        verify: compare before writing. Without it nothing is compared and the spec says so.

    Returns:
        The files by format, and the spec under "spec".

    Raises:
        ImportError: if a package of a format is missing, before anything is built.
        PermissionError: if ``out_dir`` cannot be written to.
        TypeError: if the policy has a part that cannot be exported.
        ValueError: for an unknown format, an environment that the policy cannot read, or one that randomizes what the
            spec states (see ``nominal_env``).
        VerificationError: naming format, step and largest deviation.

    Examples:
        >>> import tempfile
        >>> from edenrl.envs import PointMass
        >>> from edenrl.modules import gaussian_actor
        >>> policy = gaussian_actor({"observation": 14}, 2)
        >>> files = export_policy(policy, PointMass(2), tempfile.mkdtemp(), formats=["jit"])
        >>> [path.name for path in files.values()]
        ['policy.pt', 'policy_spec.json']
    """
    check_formats(formats)
    out_dir = Path(out_dir)
    contract = contract_of(env)
    deployed = copy.deepcopy(policy).to("cpu").float().eval().requires_grad_(False)
    graph = PolicyGraph(deployed, env.observation_spec, env.action_key).eval()
    spec = PolicySpec(
        model=ModelSpec(
            files=[ModelFile(format=name, file=_FORMATS[name].file, sha256="0" * 64, size=1) for name in formats],
            inputs=_tensors(graph, "obs", graph.width, "_in"),
            outputs=[],
            normalization="in the graph" if any(isinstance(m, RunningNorm) for m in graph.modules()) else "none",
        ),
        observations=observations_of(graph, env, contract),
        actions=actions_of(env, graph.action_key, contract.actions),
        rate=contract.rate,
        entities=contract.entities,
        provenance=_provenance(formats, checkpoint, task),
    )
    names = [*(entry.file for entry in _FORMATS.values()), _SPEC]
    with staging(out_dir, names) as staged, torch.no_grad(), _quiet():
        recording = _record(deployed, graph, env)
        example = (torch.zeros(3, graph.width), *(state.zeros(3) for state in graph.states))
        spec.model.outputs = _tensors(graph, "actions", recording.actions[0], "_out")
        for entry in spec.model.files:
            path = staged / entry.file
            _FORMATS[entry.format].save(graph, example, path)
            content = path.read_bytes()
            entry.sha256, entry.size = hashlib.sha256(content).hexdigest(), len(content)
            entry.opset = OPSET if entry.format == "onnx" else None
        (staged / _SPEC).write_text(spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if verify:
            spec.model.verification = _verify(deployed, graph, recording, staged, formats)
            (staged / _SPEC).write_text(spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
        publish(staged, names)
    return {**{name: out_dir / _FORMATS[name].file for name in formats}, "spec": out_dir / _SPEC}


def check_formats(formats: Sequence[str]) -> None:
    """Refuses unknown formats, and formats whose packages are not installed.

    Raises:
        ValueError: for an unknown or repeated format, or none at all.
        ImportError: with the command that installs what is missing.

    Examples:
        >>> check_formats(["onxx"])
        Traceback (most recent call last):
        ...
        ValueError: formats=['onxx'] was given; expected different names out of ['onnx', 'jit', 'pt2'].
    """
    given = [formats] if isinstance(formats, str) else list(formats)
    if isinstance(formats, str) or not given or len(set(given)) < len(given) or set(given) - set(_FORMATS):
        raise ValueError(f"formats={given} was given; expected different names out of {list(_FORMATS)}.")
    for name in given:
        missing = [package for package in _FORMATS[name].packages if importlib.util.find_spec(package) is None]
        if missing:
            raise ImportError(
                f'The format {name!r} needs {", ".join(missing)}, not installed: pip install "edenrl[onnx]". Other '
                f"formats: {[other for other, entry in _FORMATS.items() if not entry.packages]}."
            )


def _tensors(graph: PolicyGraph, first: str, example: int | Tensor, suffix: str) -> list[TensorInfo]:
    if isinstance(example, int):
        shape, dtype = [example], torch.float32
    else:
        shape, dtype = list(example.shape[1:]), example.dtype
    kind: Literal["float32", "int64"] = "int64" if dtype == torch.int64 else "float32"
    states = [
        TensorInfo(
            name=state.name + suffix,
            dtype="float32",
            shape=["batch" if axis == state.batch_axis else size for axis, size in enumerate(state.shape)],
        )
        for state in graph.states
    ]
    return [TensorInfo(name=first, dtype=kind, shape=["batch", *shape]), *states]


# The formats: how a graph is written, and how the file is run for the comparison.


def _save_onnx(graph: PolicyGraph, example: tuple[Tensor, ...], path: Path) -> None:
    import onnx

    torch.onnx.export(
        graph,
        example,
        path,
        input_names=["obs", *(f"{state.name}_in" for state in graph.states)],
        output_names=["actions", *(f"{state.name}_out" for state in graph.states)],
        dynamic_shapes=_dynamic_shapes(graph),
        dynamo=True,
        external_data=False,  # one file, whatever its size
        opset_version=OPSET,
        verbose=False,
    )
    onnx.checker.check_model(str(path), full_check=True)


def _run_onnx(path: Path, states: Sequence[State]) -> _Runner:
    policy = load_policy(path.parent)

    def run(obs: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        policy.state = {f"{entry.name}_in": value.numpy() for entry, value in zip(states, state, strict=True)}
        actions = torch.from_numpy(policy(obs.numpy()))
        return actions, [torch.from_numpy(value) for value in policy.state.values()]

    return run


class _Listed(nn.Module):
    """The graph with its states in one list, which a TorchScript attribute can hold whatever their number."""

    def __init__(self, graph: PolicyGraph) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, obs: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        actions, *state = self.graph(obs, *state)
        return actions, state


class _Stateful(nn.Module):
    """The TorchScript policy that keeps its state inside."""

    # Shown to the TorchScript compiler, which reads neither Sequence nor "X | None".
    def __init__(self, graph: Any, states: Sequence[State]) -> None:
        super().__init__()
        self.graph = graph
        self.initial = torch.jit.Attribute([state.zeros(1) for state in states], list[Tensor])
        self.axes = torch.jit.Attribute([state.batch_axis for state in states], list[int])
        self.state = torch.jit.Attribute([state.zeros(1) for state in states], list[Tensor])
        self.rows = torch.jit.Attribute(0, int)

    def forward(self, obs: Tensor) -> Tensor:
        if self.rows == 0:
            self.rows = obs.size(0)
            self.state = [
                torch.repeat_interleave(zero, self.rows, dim=axis)
                for zero, axis in zip(self.initial, self.axes)  # noqa: B905
            ]
        if self.rows != obs.size(0):
            raise ValueError("the number of rows changed; call reset() first")
        actions, self.state = self.graph(obs, self.state)
        return actions

    @torch.jit.export
    def reset(self) -> None:
        self.rows = 0


def _save_jit(graph: PolicyGraph, example: tuple[Tensor, ...], path: Path) -> None:
    if not graph.states:
        torch.jit.trace(graph, example, check_trace=False).save(str(path))
        return
    traced = torch.jit.trace(_Listed(graph), (example[0], list(example[1:])), check_trace=False, strict=False)
    torch.jit.script(_Stateful(traced, graph.states)).save(str(path))


def _run_jit(path: Path, states: Sequence[State]) -> _Runner:
    policy = torch.jit.load(str(path), map_location="cpu")

    def run(obs: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if not states:
            return policy(obs), []
        policy.rows, policy.state = len(obs), state
        return policy(obs), list(policy.state)

    return run


def _save_pt2(graph: PolicyGraph, example: tuple[Tensor, ...], path: Path) -> None:
    torch.export.save(torch.export.export(graph, example, dynamic_shapes=_dynamic_shapes(graph)), path)


def _run_pt2(path: Path, states: Sequence[State]) -> _Runner:
    policy = torch.export.load(path).module()

    def run(obs: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        out = policy(obs, *state)
        return (out[0], list(out[1:])) if states else (out, [])

    return run


def _dynamic_shapes(graph: PolicyGraph) -> dict[str, Any]:
    batch = torch.export.Dim("batch", min=1)
    state = tuple({state.batch_axis: batch} for state in graph.states)
    return {"obs": {0: batch}, **({"state": state} if state else {})}


@dataclass(frozen=True)
class _Format:
    file: str
    save: Callable[[PolicyGraph, tuple[Tensor, ...], Path], None]
    run: Callable[[Path, Sequence[State]], _Runner]
    packages: tuple[str, ...] = ()


_FORMATS = {
    "onnx": _Format("policy.onnx", _save_onnx, _run_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "jit": _Format("policy.pt", _save_jit, _run_jit),
    "pt2": _Format("policy.pt2", _save_pt2, _run_pt2),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what the exporters say about their own future and about torch internals from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# Verification.


@dataclass
class _Recording:
    """What the policy did: a list entry per step, rows first."""

    template: TensorDictBase
    """A TensorDict the policy can read, of the environment's rows."""
    obs: list[Tensor]
    began: list[Tensor]
    """Rows whose episode began at that step, boolean."""
    actions: list[Tensor]
    states: list[list[Tensor]]
    """Next states, in the layout of the graph."""
    decided: list[Tensor]
    """Rows whose action does not hang on rounding, boolean: a discrete choice may be a tie."""


def _record(policy: TensorDictModuleBase, graph: PolicyGraph, env: EnvBase) -> _Recording:
    """Plays the deterministic policy for a few control steps."""
    td = env.reset()
    rows = env.batch_size.numel()
    began = torch.ones(rows, dtype=torch.bool)
    state = [entry.zeros(rows) for entry in graph.states]
    out = _Recording(td, [], [], [], [], [])
    for _ in range(_STEPS):
        flat = td.exclude("next").to("cpu").reshape(rows).apply(_single)
        try:
            done = _act(policy, graph, flat, state, began)
        except RuntimeError as error:
            shapes = {key: tuple(shape) for key, shape in graph.groups.items()}
            raise ValueError(
                f"The policy cannot read this environment, whose groups have the shapes {shapes}: {error}. Export with "
                "the environment the policy was trained in."
            ) from error
        actions, next_state, decided = done
        out.template = flat
        out.obs.append(graph.flatten(flat))
        out.began.append(began)
        out.actions.append(actions)
        out.states.append(next_state)
        out.decided.append(decided)
        leaf = env.action_spec
        action = actions.reshape(leaf.shape).to(device=leaf.device, dtype=leaf.dtype)
        stepped, td = env.step_and_maybe_reset(td.set(env.action_key, action))
        began = stepped["next", "done"].reshape(rows, -1).any(-1).cpu()
        state = next_state
    return out


def _single(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _act(
    policy: TensorDictModuleBase, graph: PolicyGraph, td: TensorDictBase, state: list[Tensor], began: Tensor
) -> tuple[Tensor, list[Tensor], Tensor]:
    """One step of the TensorDict policy itself: actions, next states and decided rows."""
    td = td.copy()
    if graph.states:
        td["is_init"] = began.unsqueeze(-1)
        for entry, value in zip(graph.states, _restarted(graph, state, began), strict=True):
            td.set(entry.key, entry.swap(value).contiguous())
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        td = policy(td)
    states = [entry.swap(td.get(unravel_key(("next", entry.key)))).contiguous() for entry in graph.states]
    decided = torch.ones(len(began), dtype=torch.bool)
    if graph.scores_key is not None:
        best = td.get(graph.scores_key).topk(2, dim=-1).values
        decided = best[:, 0] - best[:, 1] > _TOLERANCE * (1 + best[:, 0].abs())
    return td.get(graph.action_key), states, decided


def _restarted(graph: PolicyGraph, state: list[Tensor], began: Tensor) -> list[Tensor]:
    out = []
    for entry, value in zip(graph.states, state, strict=True):
        zeroed = entry.swap(value).clone()
        zeroed[began] = 0.0
        out.append(entry.swap(zeroed).contiguous())
    return out


def _probe(policy: TensorDictModuleBase, graph: PolicyGraph, recording: _Recording, rows: int) -> _Recording:
    """Two steps on random observations around the recorded ones, some far out, for another batch size."""
    generator = torch.Generator().manual_seed(rows)
    seen = torch.cat(recording.obs)
    spread = seen.std(0, correction=0) + 1.0
    template = recording.template[torch.arange(rows) % len(recording.template)]
    out = _Recording(template, [], [], [], [], [])
    state = [entry.zeros(rows) for entry in graph.states]
    for step in range(2):
        pick = torch.randint(len(seen), (rows,), generator=generator)
        obs = seen[pick] + 3.0 * spread * torch.randn(rows, graph.width, generator=generator)
        td = template.copy()
        parts = zip(graph.groups.items(), obs.split(graph.widths, -1), strict=True)
        for (key, shape), part in parts:
            td.set(key, part.reshape(rows, *shape))
        began = torch.full((rows,), step == 0)
        actions, state, decided = _act(policy, graph, td, state, began)
        for column, value in zip(
            (out.obs, out.began, out.actions, out.states, out.decided),
            (obs, began, actions, state, decided),
            strict=True,
        ):
            column.append(value)  # type: ignore[attr-defined]
    return out


def _verify(
    policy: TensorDictModuleBase, graph: PolicyGraph, recording: _Recording, staged: Path, formats: Sequence[str]
) -> Verification:
    probes = [_probe(policy, graph, recording, rows) for rows in _PROBES]
    worst = {}
    for name in formats:
        run = _FORMATS[name].run(staged / _FORMATS[name].file, graph.states)
        worst[name] = max(
            _compare(name, where, run, graph, expected)
            for where, expected in [
                ("control step", recording),
                *((f"random observations, batch size {rows}, step", probe) for rows, probe in zip(_PROBES, probes)),
            ]
        )
    return Verification(
        control_steps=_STEPS,
        rows=len(recording.began[0]),
        probes=sum(len(obs) for probe in probes for obs in probe.obs),
        tolerance=_TOLERANCE,
        max_deviation={name: float(f"{value:.3g}") for name, value in worst.items()},
    )


def _compare(name: str, where: str, run: _Runner, graph: PolicyGraph, expected: _Recording) -> float:
    """Largest deviation of a format over a recording."""
    largest = 0.0
    state = [entry.zeros(len(expected.obs[0])) for entry in graph.states]
    for step, obs in enumerate(expected.obs):
        try:
            actions, state = run(obs, _restarted(graph, state, expected.began[step]))
        except Exception as error:  # whatever the runtime of a format raises
            raise VerificationError(f"The {name} export fails at {where} {step}: {error}. {_KEPT}") from error
        pairs = [("actions", actions, expected.actions[step])]
        pairs += [
            (entry.name, got, want) for entry, got, want in zip(graph.states, state, expected.states[step], strict=True)
        ]
        for what, got, want in pairs:
            if got.shape != want.shape:
                raise VerificationError(
                    f"The {name} export gives {what} of shape {tuple(got.shape)} at {where} {step}; the policy gives "
                    f"{tuple(want.shape)}. {_KEPT}"
                )
            if what == "actions":
                got, want = got[expected.decided[step]], want[expected.decided[step]]
            difference = (got.double() - want.double()).abs()
            # NaN compares false, so that a NaN on one side is a deviation as well.
            close = (difference <= _TOLERANCE + _TOLERANCE * want.double().abs()) | (got.isnan() & want.isnan())
            deviation = float(difference.nan_to_num(nan=np.inf).max()) if difference.numel() else 0.0
            if not bool(close.all()):
                raise VerificationError(
                    f"The {name} export differs from the policy at {where} {step}: largest deviation {deviation:.3g} "
                    f"in {what}, tolerance {_TOLERANCE:g}. {_KEPT}"
                )
            largest = max(largest, deviation)
    return largest


_KEPT = "Nothing was written; an earlier export is as it was."


# Provenance.


def _provenance(formats: Sequence[str], checkpoint: str | Path | None, task: str | None) -> Provenance:
    import edenrl

    packages = ["torch", "torchrl", "tensordict", *(p for name in formats for p in _FORMATS[name].packages)]
    versions = {"edenrl": edenrl.__version__, **{name: importlib.metadata.version(name) for name in packages}}
    now = datetime.datetime.now(datetime.timezone.utc)
    return Provenance(
        versions=versions,
        task=task,
        checkpoint=None if checkpoint is None else Path(checkpoint).name,
        checkpoint_sha256=None if checkpoint is None else _sha256(Path(checkpoint)),
        git_revision=_git_revision(),
        created=now.isoformat(timespec="seconds"),
    )


def _sha256(path: Path) -> str:
    """Of a file, or of a folder's files and their names."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            if path.is_dir():
                digest.update(file.relative_to(path).as_posix().encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _git_revision() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
