"""The weights that a new run takes from another one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError

from edenrl.config import RunConfig
from edenrl.training.checkpoint_files import check_checkpoint
from edenrl.training.checkpoint_folder import find_checkpoint, naming_intact_ones, reading

__all__ = ["InitialWeights"]

# What policies are wrapped in: algorithms differ in it, and the layers inside have the same names.
_WRAPPERS = re.compile(r"^(?:module\.(?:0\.module\.)?)?(?:actor\.)?")


class InitialWeights:
    """A checkpoint of another run, whose weights the networks of a new run take where names and shapes agree.

    Each component takes from the component of the same name. A layer is taken whole or not at all: normalization
    statistics belong to each other, and a bias means nothing without its weights. What is not trained is not taken:
    schedules, constraints, frozen copies of networks. Neither are optimizers, counters and replay data.

    Args:
        run_dir: the other run's directory.
        which: as for ``edenrl.training.load_weights``.

    Raises:
        FileNotFoundError: for what is no run, or a checkpoint that is not there.
        DamagedCheckpointError: if the checkpoint is not as it was written.

    Examples:
        >>> import tempfile
        >>> from edenrl.training import Run
        >>> def train(**options):
        ...     cfg = RunConfig(run_dir=tempfile.mkdtemp(), quiet=True, **options)
        ...     with Run(cfg, "Line", iterations=1, frames_per_iteration=1) as run:
        ...         net = run.keep(net=nn.Linear(2, 1))
        ...         for _ in run:
        ...             pass
        ...     return cfg.run_dir, net.weight
        >>> first, weight = train(seed=1)
        >>> _, started = train(seed=2, init_from=first)
        >>> bool((started == weight).all())
        True
    """

    def __init__(self, run_dir: str, which: str = "best") -> None:
        self.path = find_checkpoint(run_dir, which)
        with naming_intact_ones(self.path.parent):
            metadata = check_checkpoint(self.path, ())["metadata"]
        self._algorithm, self._layout = metadata["algorithm"], metadata["layout"]
        self._parts: list[_Part] = []

    @classmethod
    def of(cls, cfg: RunConfig) -> InitialWeights | None:
        """The weights that a configuration asks for, if it does."""
        return None if cfg.init_from is None else cls(cfg.init_from, cfg.init_checkpoint)

    def give(self, name: str, network: nn.Module) -> None:
        """Loads what fits into a network, which is the component of this name; one that is not trained stays as it is.

        Args:
            name: the component's name.
            network: the network.
        """
        if not any(parameter.requires_grad for parameter in network.parameters()):
            return
        state = network.state_dict()
        saved = self._read(name) if name in self._layout else {}
        there, part = _Layers(saved), _Part(name)
        for layer, shapes in _Layers(state).shapes.items():
            source = there.find(layer)
            if source is None:
                part.absent.append(_title(layer, shapes))
            elif differences := _differences(_prefix(_relative(layer)), there.shapes[source], shapes):
                part.different += differences
            else:
                part.taken.append(_title(layer, shapes))
                state.update({_prefix(layer) + entry: saved[_prefix(source) + entry] for entry in shapes})
        network.load_state_dict(state)
        self._parts.append(part)

    def _read(self, name: str) -> dict[str, Any]:
        with naming_intact_ones(self.path.parent):
            check_checkpoint(self.path, [name])
        reader = _Reader()
        with reading(self.path):
            Checkpoint(**{name: reader}).load(self.path, map_location="cpu")
        return reader.state

    def require_some(self) -> None:
        """Refuses a run that has taken nothing.

        Raises:
            CheckpointError: naming the layers of both.
        """
        if any(part.taken for part in self._parts):
            return
        there = "; ".join(f"{name}: {', '.join(_Layers(shapes).titles())}" for name, shapes in self._layout.items())
        here = "; ".join(f"{part.name}: {part.left_out()}" for part in self._parts)
        raise CheckpointError(
            f"No weights of {self.path} ({self._algorithm}) fit this run. It holds {there or 'no networks'}. What this "
            f"run needs is {here or 'nothing, for it trains no network'}."
        )

    def report(self) -> str:
        """What was taken and what was left out, one line for each component."""
        lines = [f"  {part.name}: {part.report()}" for part in self._parts]
        return "\n".join([f"Weights of {self.path} ({self._algorithm}):", *lines])


@dataclass
class _Part:
    """What became of the layers of one component."""

    name: str
    taken: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)

    def left_out(self) -> str:
        """What was not taken, and why."""
        reasons = [f"{', '.join(self.absent)} (not there)"] if self.absent else []
        return ", ".join([*reasons, *self.different])

    def report(self) -> str:
        """What was taken and what was left out."""
        left_out = self.left_out()
        if not left_out:
            return "all of it was taken"
        if not self.taken:
            return f"nothing was taken; new are {left_out}"
        return f"took {', '.join(self.taken)}; new are {left_out}"


class _Reader:
    """Receives the state of a component as it is in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class _Layers:
    """The entries of a state by layer.

    Args:
        state: tensors, or the shapes of tensors, by name.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, value in state.items():
            # A parametrized weight is a module of its own; it belongs to the layer that has the bias.
            layer, parametrized, entry = key.partition(".parametrizations.")
            if not parametrized:
                layer, _, entry = key.rpartition(".")
            if torch.is_tensor(value) or isinstance(value, list):
                shape = value.shape if torch.is_tensor(value) else value
                name = f"parametrizations.{entry}" if parametrized else entry
                self.shapes.setdefault(layer, {})[name] = tuple(shape)
        self._by_relative_name = {_relative(layer): layer for layer in self.shapes}

    def find(self, layer: str) -> str | None:
        """The layer of that name, or of that name within another wrapper."""
        return layer if layer in self.shapes else self._by_relative_name.get(_relative(layer))

    def titles(self) -> Iterable[str]:
        """The names of the layers, for people."""
        return [_title(layer, shapes) for layer, shapes in self.shapes.items()]


def _relative(layer: str) -> str:
    """The name of a layer within its policy or critic."""
    return _WRAPPERS.sub("", f"{layer}.").removesuffix(".")


def _prefix(layer: str) -> str:
    return f"{layer}." if layer else ""


def _title(layer: str, entries: Iterable[str]) -> str:
    """The name of a layer; entries that belong to no layer are named themselves."""
    return _relative(layer) or ", ".join(entries)


def _differences(prefix: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The entries of a layer that differ, with both shapes."""
    return [
        f"{prefix}{entry} ({here.get(entry, 'nothing')} here, {there.get(entry, 'nothing')} there)"
        for entry in dict.fromkeys([*here, *there])
        if here.get(entry) != there.get(entry)
    ]
