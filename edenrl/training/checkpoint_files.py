"""How a checkpoint lies on disk: files written in the ordinary way, each with its size and checksum in the manifest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from tensordict.utils import json_dumps
from torchrl.checkpoint import Checkpoint, CheckpointError, StateDictCheckpointAdapter
from torchrl.checkpoint._checkpoint import _encode_state_dict_value

__all__ = ["DamagedCheckpointError", "SealedCheckpoint", "StateDictFile", "check_checkpoint", "folder_bytes"]

_MANIFEST = "manifest.json"
# Of this library's part of the manifest. Checkpoints from before it had a version have no such part.
_FORMAT = 1


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose files are not as they were written."""


class StateDictFile(StateDictCheckpointAdapter):
    """Writes a ``state_dict`` in TorchRL's "consolidated" format, which TorchRL's own adapter reads.

    TorchRL writes that file through a memory map. When the disk is full the system then kills the process (SIGBUS). An
    ordinary write raises an ``OSError`` instead.
    """

    def __init__(self) -> None:
        super().__init__("consolidated")

    def save(self, component: Any, path: Path, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Writes the state into the folder ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        state = component.state_dict(*args, **kwargs)
        tensors: dict[str, Any] = {}
        schema = _encode_state_dict_value(state, tensors)
        packed = TensorDict(tensors, batch_size=[]).consolidate(device="cpu", metadata=True)._consolidated
        layout = json_dumps(packed["metadata"])
        layout = layout.encode() if isinstance(layout, str) else layout
        with open(path / self.state_consolidated, "wb") as file:
            file.write(packed["storage"].numpy().data)
            file.write(layout)
            file.write(len(layout).to_bytes(8, "little"))
        (path / self.schema_filename).write_text(json.dumps(schema, separators=(",", ":")) + "\n", encoding="utf-8")
        return state


class SealedCheckpoint(Checkpoint):
    """A TorchRL checkpoint whose manifest holds the size and the SHA-256 checksum of every file, itself included.

    ``check_checkpoint`` compares them. TorchRL's own ``Checkpoint`` reads such checkpoints too.
    """

    @staticmethod
    def _publish_path(source: Path, destination: Path) -> None:
        # TorchRL calls this when everything is written and before the checkpoint gets its name.
        _seal(source)
        Checkpoint._publish_path(source, destination)


def _seal(folder: Path) -> None:
    path = folder / _MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != path)
    sums = {file.relative_to(folder).as_posix(): [file.stat().st_size, _file_sum(file)] for file in files}
    manifest["metadata"]["sealed"] = True
    manifest["edenrl"] = {"format": _FORMAT, "files": sums}
    manifest["edenrl"]["manifest"] = _manifest_sum(manifest)
    path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_checkpoint(path: Path, components: Collection[str] | None = None) -> dict[str, Any]:
    """Compares the files of a checkpoint with its manifest and returns the manifest.

    Args:
        path: the checkpoint.
        components: names of the components whose files are compared; without any, only the manifest is checked.
            Default: all.

    Raises:
        DamagedCheckpointError: naming the file that is missing, too short, too long or changed.
        CheckpointError: if a newer version of this library has written the checkpoint.
    """
    try:
        manifest = Checkpoint.manifest(path)
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path / _MANIFEST} is damaged: {error}") from None
    if "metadata" not in manifest:
        raise DamagedCheckpointError(f"{path / _MANIFEST} is damaged: it has no metadata.")
    # Either mark is enough: one of them may be what is damaged.
    if "edenrl" not in manifest and not manifest["metadata"].get("sealed"):
        return manifest  # saved by a version without checksums, or by TorchRL alone
    own = manifest.get("edenrl", {})
    # The version comes first: a newer one may compute the checksum in another way.
    if own.get("format", 0) > _FORMAT:
        raise CheckpointError(
            f"{path} was saved by a newer version of edenrl (format {own['format']}; this one reads up to {_FORMAT}). "
            "Update edenrl."
        )
    if own.get("manifest") != _manifest_sum(manifest):
        raise DamagedCheckpointError(f"{path / _MANIFEST} is damaged: its content is not what was written (checksum).")
    records = manifest["components"]
    folders = [records[name]["path"] for name in records if components is None or name in components]
    for name, (size, checksum) in own["files"].items():
        if any(name.startswith(f"{folder}/") for folder in folders):
            _check_file(path / name, size, checksum)
    return manifest


def _check_file(file: Path, size: int, checksum: str) -> None:
    if not file.is_file():
        raise DamagedCheckpointError(f"{file} is missing.")
    if (found := file.stat().st_size) != size:
        raise DamagedCheckpointError(f"{file} is damaged: it has {found:,} bytes and was written with {size:,}.")
    if _file_sum(file) != checksum:
        raise DamagedCheckpointError(f"{file} is damaged: its content is not what was written (checksum).")


def _file_sum(file: Path) -> str:
    digest = hashlib.sha256()
    with open(file, "rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _manifest_sum(manifest: Mapping[str, Any]) -> str:
    own = {key: value for key, value in manifest.get("edenrl", {}).items() if key != "manifest"}
    return hashlib.sha256(json.dumps({**manifest, "edenrl": own}, sort_keys=True).encode()).hexdigest()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
