"""Writes a policy as files that run without torch, after checking that they compute the same."""

from __future__ import annotations

import copy
import datetime
import hashlib
import importlib
import importlib.metadata
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.envs import EnvBase

from edenrl import __version__
from edenrl.export.contract import actions_of, contract_of, observations_of
from edenrl.export.folder import publish, staging
from edenrl.export.formats import FORMATS, OPSET, check_formats, quiet
from edenrl.export.graph import PolicyGraph
from edenrl.export.spec import ModelFile, ModelSpec, PolicySpec, Provenance, TensorInfo
from edenrl.export.verification import record
from edenrl.export.verification import verify as verify_files
from edenrl.modules import RunningNorm, UnitBatchNorm

__all__ = ["export_policy"]

_SPEC = "policy_spec.json"


def export_policy(
    policy: TensorDictModuleBase,
    env: EnvBase,
    out_dir: str | Path,
    *,
    formats: Sequence[str] = ("onnx", "jit"),
    checkpoint: str | Path | None = None,
    task: str | None = None,
    task_kwargs: Mapping[str, Any] | None = None,
    verify: bool = True,
) -> dict[str, Path]:
    """Writes the deterministic policy and its contract into a folder.

    The graphs take ``obs`` ``[batch, width]``, float32: the policy's observation groups, un-normalized and concatenated
    in order. They give ``actions`` before the environment's clipping and scaling, for any batch size. A recurrent
    policy also takes and returns its state (``h_in``, ``c_in``, ``h_out``, ``c_out``, ``(layers, batch, hidden)``). In
    TorchScript it keeps the state inside, with a method ``reset()``. ``policy_spec.json`` holds everything else that a
    deployment needs, see ``PolicySpec``.

    Everything is prepared inside ``out_dir`` and compared with the policy, on four real control steps of the
    environment and on random observations (absolute and relative tolerance 1e-4). Then it is moved in at once: a
    failure or a kill at any instant leaves an earlier export as it was. The policy is copied and not touched. The
    environment is stepped.

    Args:
        policy: a TensorDict policy, see ``PolicyGraph`` for what it may be made of. Recurrent modules of TorchRL need
            neither primer nor ``InitTracker`` in the environment.
        env: the environment it was trained in, with the transforms that change observations or actions.
        out_dir: folder; created when missing. Needs symbolic links.
        formats: any of "onnx" (``policy.onnx``), "jit" (TorchScript, ``policy.pt``) and "pt2" (torch.export,
            ``policy.pt2``). A graph of another format that an earlier export left there is removed.
        checkpoint: where the weights come from, for the record; nothing is loaded.
        task: name of the environment, for the record.
        task_kwargs: arguments of its constructor, for the record; JSON must hold them.
        verify: compare before writing. Without it nothing is compared, onnxruntime is not needed, and the spec's
            ``verification`` is null.

    Returns:
        The files by format, and the spec under "spec".

    Raises:
        ImportError: if a package of a format is missing or cannot be imported, before anything is built.
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
    check_formats(formats, verify=verify)
    out_dir = Path(out_dir)
    contract = contract_of(env)
    deployed = copy.deepcopy(policy).to("cpu").float().eval().requires_grad_(False)
    graph = PolicyGraph(deployed, env.observation_spec, env.action_key).eval()
    packages = [package for name in formats for package in FORMATS[name].needs(verify)]
    spec = PolicySpec(
        model=_model_without_files(graph, formats),
        observations=observations_of(graph, env, contract),
        actions=actions_of(env, graph.action_key, contract.actions),
        rate=contract.rate,
        entities=contract.entities,
        provenance=_provenance(packages, checkpoint, task, task_kwargs),
    )
    names = [*(entry.file for entry in FORMATS.values()), _SPEC]
    with staging(out_dir, names) as staged, torch.no_grad(), quiet():
        recording = record(deployed, graph, env)
        example = (torch.zeros(3, graph.width), *(state.zeros(3) for state in graph.states))
        spec.model.outputs = _tensors(graph, "actions", recording.actions[0], "_out")
        for entry in spec.model.files:
            _write_graph(graph, example, staged, entry)
        (staged / _SPEC).write_text(spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if verify:
            spec.model.verification = verify_files(deployed, graph, recording, staged, formats)
            (staged / _SPEC).write_text(spec.model_dump_json(indent=2) + "\n", encoding="utf-8")
        publish(staged, names)
    return {**{name: out_dir / FORMATS[name].file for name in formats}, "spec": out_dir / _SPEC}


def _model_without_files(graph: PolicyGraph, formats: Sequence[str]) -> ModelSpec:
    """The part of the spec about the graphs, before they are written and before the actions are known."""
    normalizes = any(isinstance(module, RunningNorm | UnitBatchNorm) for module in graph.modules())
    return ModelSpec(
        files=[ModelFile(format=name, file=FORMATS[name].file, sha256="0" * 64, size=1) for name in formats],
        inputs=_tensors(graph, "obs", graph.width, "_in"),
        outputs=[],
        normalization="in the graph" if normalizes else "none",
    )


def _write_graph(graph: PolicyGraph, example: tuple[Tensor, ...], staged: Path, entry: ModelFile) -> None:
    """Writes one format into the prepared folder and notes hash, size and opset in its entry of the spec."""
    path = staged / entry.file
    try:
        FORMATS[entry.format].save(graph, example, path)
    except Exception as error:  # whatever an exporter raises
        raise TypeError(
            f"The policy cannot be written as {entry.format!r}: {error}\nGive the part that cannot be traced a "
            "method export_module(), see PolicyGraph."
        ) from error
    content = path.read_bytes()
    entry.sha256, entry.size = hashlib.sha256(content).hexdigest(), len(content)
    entry.opset = OPSET if entry.format == "onnx" else None


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


def _provenance(
    packages: Sequence[str],
    checkpoint: str | Path | None,
    task: str | None,
    task_kwargs: Mapping[str, Any] | None,
) -> Provenance:
    used = ["torch", "torchrl", "tensordict", *packages]
    versions = {"edenrl": __version__, **{name: _version(name) for name in used}}
    now = datetime.datetime.now(datetime.timezone.utc)
    return Provenance(
        versions=versions,
        task=task,
        task_kwargs=dict(task_kwargs or {}),
        checkpoint=None if checkpoint is None else Path(checkpoint).name,
        checkpoint_sha256=None if checkpoint is None else _sha256(Path(checkpoint)),
        git_revision=_git_revision(),
        created=now.isoformat(timespec="seconds"),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Installed under another name: onnxruntime-gpu, torchrl-nightly.
        return str(getattr(importlib.import_module(package), "__version__", "unknown"))


def _sha256(path: Path) -> str:
    """The hash of a file, or of all files in a folder together with their names."""
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
