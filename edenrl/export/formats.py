"""How a policy graph is written in each format, and how the file is run."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from edenrl.export.graph import PolicyGraph, State
from edenrl.export.runtime import load_policy

__all__ = ["FORMATS", "OPSET", "Runner", "check_formats", "quiet"]

OPSET = 18
Runner = Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
"""Computes (actions, next states) from obs and states, all on the CPU."""


def check_formats(formats: Sequence[str], *, verify: bool = True) -> None:
    """Refuses unknown formats, and formats whose packages are not installed or cannot be imported.

    Args:
        formats: names of formats.
        verify: whether the files will be run to be compared; otherwise the packages that run them are not needed.

    Raises:
        ValueError: for an unknown or repeated format, or none at all.
        ImportError: with the command that installs what is missing, or with what keeps a package from being imported.

    Examples:
        >>> check_formats(["onxx"])
        Traceback (most recent call last):
        ...
        ValueError: formats=['onxx'] was given; expected different names out of ['onnx', 'jit', 'pt2'].
    """
    given = [formats] if isinstance(formats, str) else list(formats)
    if isinstance(formats, str) or not given or len(set(given)) < len(given) or set(given) - set(FORMATS):
        raise ValueError(f"formats={given} was given; expected different names out of {list(FORMATS)}.")
    others = f"Other formats: {[other for other, entry in FORMATS.items() if not entry.needs(verify=True)]}."
    for name in given:
        needed = FORMATS[name].needs(verify)
        if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
            raise ImportError(
                f'The format {name!r} needs {", ".join(missing)}, not installed: pip install "edenrl[onnx]". {others}'
            )
        for package in needed:
            try:
                importlib.import_module(package)
            except Exception as error:  # a damaged installation fails in many ways
                raise ImportError(
                    f"The format {name!r} needs {package}, which is installed but cannot be imported "
                    f"({type(error).__name__}: {error}). Mend or reinstall it. {others}"
                ) from error


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


def _run_onnx(path: Path, states: Sequence[State]) -> Runner:
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

    if TYPE_CHECKING:  # what the TorchScript attributes below hold
        initial: list[Tensor]
        axes: list[int]
        state: list[Tensor]
        rows: int

    def __init__(self, graph: Any, states: Sequence[State]) -> None:
        super().__init__()
        self.graph = graph
        typed: Any = torch.jit.Attribute
        self.initial = typed([state.zeros(1) for state in states], list[Tensor])
        self.axes = typed([state.batch_axis for state in states], list[int])
        self.state = typed([state.zeros(1) for state in states], list[Tensor])
        self.rows = typed(0, int)

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


def _run_jit(path: Path, states: Sequence[State]) -> Runner:
    policy = torch.jit.load(str(path), map_location="cpu")

    def run(obs: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if not states:
            return policy(obs), []
        policy.rows, policy.state = len(obs), state
        return policy(obs), list(policy.state)

    return run


def _save_pt2(graph: PolicyGraph, example: tuple[Tensor, ...], path: Path) -> None:
    torch.export.save(torch.export.export(graph, example, dynamic_shapes=_dynamic_shapes(graph)), path)


def _run_pt2(path: Path, states: Sequence[State]) -> Runner:
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
class Format:
    """A format: its file, how to write and to run it, and the packages that each of the two needs."""

    file: str
    save: Callable[[PolicyGraph, tuple[Tensor, ...], Path], None]
    run: Callable[[Path, Sequence[State]], Runner]
    save_needs: tuple[str, ...] = ()
    run_needs: tuple[str, ...] = ()

    def needs(self, verify: bool) -> tuple[str, ...]:
        """The packages of an export, with or without verification."""
        return (*self.save_needs, *self.run_needs) if verify else self.save_needs


FORMATS = {
    "onnx": Format("policy.onnx", _save_onnx, _run_onnx, ("onnx", "onnxscript"), ("onnxruntime",)),
    "jit": Format("policy.pt", _save_jit, _run_jit),
    "pt2": Format("policy.pt2", _save_pt2, _run_pt2),
}


@contextmanager
def quiet() -> Iterator[None]:
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
