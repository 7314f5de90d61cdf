"""Checkpoints that name what they were made for and load whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.envs import EnvBase

from edenrl import distributed
from edenrl._files import disk_space
from edenrl.training.checkpoint_files import (
    DamagedCheckpointError,
    SealedCheckpoint,
    StateDictFile,
    check_checkpoint,
    folder_bytes,
)
from edenrl.training.checkpoint_folder import (
    Rotation,
    damage_of,
    find_checkpoint,
    naming_intact_ones,
    reading,
)
from edenrl.training.observations import changed_observations, describe_observations

__all__ = ["Checkpoints", "load_policy_weights", "load_weights"]


def _layout(components: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Shape of every tensor of every network."""
    return {
        name: {key: list(value.shape) for key, value in component.state_dict().items() if torch.is_tensor(value)}
        for name, component in components.items()
        if isinstance(component, nn.Module)
    }


def _network_bytes(components: Mapping[str, Any]) -> int:
    """Bytes of the networks and of what their optimizers remember."""
    states = [c.state_dict() for c in components.values() if isinstance(c, (nn.Module, torch.optim.Optimizer))]
    return sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(states) if torch.is_tensor(leaf))


def _first_difference(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    for name in current:
        if name not in saved:
            return f"it has no network {name!r} (it holds {sorted(saved)})"
        for key in [*current[name], *saved[name]]:
            ours, theirs = current[name].get(key), saved[name].get(key)
            if ours != theirs:
                as_text = [("nothing" if shape is None else f"shape {tuple(shape)}") for shape in (theirs, ours)]
                return f"{name}.{key} is {as_text[0]} in the checkpoint and {as_text[1]} in this run"
    return None


class Checkpoints:
    """The ``checkpoints/`` folder of a run: TorchRL checkpoints, the last few and the best.

    Saving is atomic: a checkpoint appears under its name only when complete, so a run killed at any instant keeps the
    previous one. Parameters that are not finite are refused, and so is a disk without enough space; the good checkpoint
    stays. The manifest holds the size and the checksum of every file, and loading compares them.

    Args:
        directory: folder, created when first saved to.
        components: what a checkpoint holds: modules, optimizers, anything with ``state_dict``/``load_state_dict``.
        algorithm: name that a checkpoint is stamped with.
        keep_last: how many of the newest to keep.
        best_metric: metadata entry by which the best one is kept.
        best_mode: "max" (default) keeps the largest, "min" the smallest.

    Examples:
        >>> import tempfile
        >>> net = nn.Linear(2, 1)
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), {"policy": net}, algorithm="PPO")
        >>> checkpoints.save(step=1, return_mean=3.0).name
        'checkpoint-000000000001'
        >>> checkpoints.load()["step"]
        1
    """

    def __init__(
        self,
        directory: str | Path,
        components: Mapping[str, Any],
        *,
        algorithm: str,
        keep_last: int = 2,
        best_metric: str = "return_mean",
        best_mode: Literal["max", "min"] = "max",
    ) -> None:
        self.components, self.algorithm, self.best_metric = dict(components), algorithm, best_metric
        self.best_mode = best_mode
        self.rotation = Rotation(directory, keep_last=keep_last, keep_best=(best_metric, best_mode))
        self._checkpoint = SealedCheckpoint()
        for name, component in self.components.items():
            # One file a component and no pickle; the default writes a file per tensor.
            adapter = None if hasattr(component, "dump") else StateDictFile()
            self._checkpoint.register(name, component, adapter=adapter)

    def save(self, step: int, **metadata: Any) -> Path:
        """Saves all components at ``step`` with JSON metadata and returns the checkpoint's path.

        Raises:
            FloatingPointError: a parameter is not finite.
            DiskFullError: the disk has not enough space. Nothing was saved, older checkpoints stay.
        """
        for name, component in self.components.items():
            if isinstance(component, nn.Module):
                for key, value in component.state_dict().items():
                    if torch.is_tensor(value) and not bool(value.isfinite().all()):
                        raise FloatingPointError(
                            f"{name}.{key} is not finite; nothing was saved and {self.latest() or 'no checkpoint'} "
                            "is the newest good state."
                        )
        # What "best" means travels along: a reader of the folder has no configuration.
        own = {"algorithm": self.algorithm, "layout": _layout(self.components), "step": step}
        own["best"] = [self.best_metric, self.best_mode]
        newest = self.latest()
        # At least: a replay buffer grows from one checkpoint to the next.
        needed = _network_bytes(self.components) if newest is None else folder_bytes(newest)
        stays = "No checkpoint was saved yet." if newest is None else f"{newest} is complete and stays."
        with disk_space(self.rotation.directory, "the checkpoint", needed, f"{stays} Free some space, then continue."):
            return self.rotation.save(self._checkpoint, step=step, metadata={**metadata, **own})

    def load(self, path: str | Path | None = None) -> dict[str, Any]:
        """Restores the newest checkpoint that is intact, or the one at ``path``, and returns its metadata.

        A newer one whose files are damaged is named in a warning.

        Raises:
            CheckpointError: if it belongs to another algorithm or architecture (naming the first difference, before
                anything is changed), or if a component is missing.
            DamagedCheckpointError: if a file is missing or is not as it was written, naming the file.
        """
        path = self._newest_intact() if path is None else Path(path)
        metadata = check_checkpoint(path)["metadata"]
        if metadata.get("algorithm") != self.algorithm:
            raise CheckpointError(
                f"{path} was saved by {metadata.get('algorithm')!r}, this run is {self.algorithm!r}. Resume it "
                "with the script it was trained with."
            )
        if difference := _first_difference(metadata["layout"], _layout(self.components)):
            raise CheckpointError(
                f"{path} does not fit this run's networks: {difference}. Use the run's own config.json, or start a new "
                "run. Nothing was loaded."
            )
        networks = [component for component in self.components.values() if isinstance(component, nn.Module)]
        device = next((parameter.device for network in networks for parameter in network.parameters()), None)
        with reading(path):
            self._checkpoint.load(path, map_location=device)
        return metadata

    def _newest_intact(self) -> Path:
        paths = self.rotation.all_paths()
        if not paths:
            raise FileNotFoundError(f"No checkpoint in {self.rotation.directory}.")
        found: list[str] = []
        for path in paths:
            damage = damage_of(path)
            if damage is None:
                if found and distributed.rank() == 0:
                    warnings.warn(f"{' '.join(found)} Continuing from {path}, the newest intact one.", stacklevel=3)
                return path
            found.append(str(damage))
        raise DamagedCheckpointError(
            f"{' '.join(found)} {self.rotation.directory} holds no intact checkpoint: put an intact copy back, or "
            "start a new run."
        )

    def find(self, which: str) -> Path | None:
        """The path of the checkpoint "best", or of that name, in this folder; None for "latest", which ``load`` finds.

        Raises:
            FileNotFoundError: if there is none of that name (listing those there are).
            CheckpointError: for a path into another folder.
        """
        if which == "latest":
            return None
        path = find_checkpoint(self.rotation.directory.parent, which)
        if path.parent.resolve() != self.rotation.directory.resolve():
            raise CheckpointError(
                f"{path} is no checkpoint of this run. To start a new run from its weights, use --init_from."
            )
        return path

    def manifest(self, which: str) -> tuple[Path, dict[str, Any]] | None:
        """The path and the metadata of the checkpoint that ``find`` names.

        For "latest" it is the newest one whose manifest is as it was written; ``None`` without one.

        Raises:
            DamagedCheckpointError: if a file of the one that was named is not as it was written.
        """
        if named := self.find(which):
            with naming_intact_ones(self.rotation.directory):
                return named, check_checkpoint(named)["metadata"]
        for path in self.rotation.all_paths():
            with contextlib.suppress(DamagedCheckpointError):
                return path, check_checkpoint(path, ())["metadata"]
        return None

    def later(self, step: int) -> list[str]:
        """Names of the checkpoints of later steps; the next ``save`` removes them."""
        return [path.name for path in self.rotation.all_paths(after=step)]

    def latest(self) -> Path | None:
        """The newest complete checkpoint, or ``None``."""
        return self.rotation.latest()

    def best(self) -> Path | None:
        """The checkpoint with the best metric, or ``None`` when none was evaluated."""
        return self.rotation.best()

    def sweep(self) -> None:
        """Removes what a killed process left half-written (hidden staging folders)."""
        if self.rotation.directory.is_dir():
            for leftover in self.rotation.directory.glob(f".{self.rotation.prefix}-*"):
                shutil.rmtree(leftover, ignore_errors=True)


def load_policy_weights(
    policy: nn.Module, run_dir: str | Path, which: str = "best", *, env: EnvBase | None = None
) -> Path:
    """Loads only the policy of a run, statistics included; see ``load_weights``.

    Args:
        policy: a policy built from the run's ``config.json``.
        run_dir: the run directory.
        which: as for ``load_weights``.
        env: as for ``load_weights``.

    Returns:
        The path of the checkpoint that was read.
    """
    return load_weights({"policy": policy}, run_dir, which, env=env)


def load_weights(
    networks: Mapping[str, nn.Module], run_dir: str | Path, which: str = "best", *, env: EnvBase | None = None
) -> Path:
    """Loads some of a run's networks, statistics included; the rest of the checkpoint is not needed.

    Args:
        networks: the networks by the names of the run's components, such as "policy" and "critic".
        run_dir: the run directory.
        which: "best" (by the run's ``evaluation.metric``; the newest if none was evaluated), "latest", a checkpoint's
            path, or its name in the run's ``checkpoints/``.
        env: the environment, as its simulator made it, that the networks were built for. When widths differ the error
            then names the observation group and the term.

    Returns:
        The path of the checkpoint that was read.

    Raises:
        FileNotFoundError: for what is no run, a run without checkpoints, or without the one that was named (listing
            what there is).
        CheckpointError: for another architecture, naming the first difference.
        DamagedCheckpointError: if a file is missing or is not as it was written, naming it and the intact checkpoints.
    """
    path = find_checkpoint(run_dir, which)
    with naming_intact_ones(path.parent):
        saved = check_checkpoint(path, networks)["metadata"]["layout"]
    if difference := _first_difference(saved, _layout(networks)):
        changed = "" if env is None else changed_observations(path.parent.parent, describe_observations(env))
        raise CheckpointError(
            f"{path} does not fit this {' and '.join(networks)}: {difference}.{changed} Nothing was loaded."
        )
    device = next(next(iter(networks.values())).parameters()).device
    with reading(path):
        Checkpoint(**networks).load(path, map_location=device)
    return path
