"""Configurations as JSON files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from edenrl._files import write_atomic
from edenrl.config.base import Config

ConfigT = TypeVar("ConfigT", bound=Config)


def save_config(cfg: Config, path: str | os.PathLike[str]) -> None:
    """Write `cfg` to `path` as JSON, atomically: a reader finds the old file or the new one, never half of one.

    Paths are stored as they were given. Missing folders are created.

    Examples:
        >>> import tempfile
        >>> from edenrl.config import EnvConfig, load_config, save_config
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_config(EnvConfig(num_envs=8), f"{folder}/env.json")
        ...     load_config(EnvConfig, f"{folder}/env.json").num_envs
        8
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, cfg.model_dump_json(indent=2) + "\n")


def load_config(cls: type[ConfigT], path: str | os.PathLike[str]) -> ConfigT:
    """Read what ``save_config`` wrote; fields the file does not name take their defaults.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not JSON, or not a valid `cls`; the message names the file and each wrong field.
    """
    values = read_config(path)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{os.fspath(path)} is not a valid {cls.__name__}:\n{describe_mistakes(error)}") from None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fields in a file that ``save_config`` wrote, not yet checked: for a reader that must still find the class.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it does not hold one JSON object; the message names the file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{os.fspath(path)}: no such file") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{os.fspath(path)} is a directory; give a file, such as its config.json") from None
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is not readable as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(path)} must hold one JSON object of fields, got {type(values).__name__}")
    return values


def describe_mistakes(error: ValidationError, limit: int = 10) -> str:
    """One line per mistake, with its dotted path: at most `limit` of them, so that they fit on one screen."""
    lines = []
    for item in error.errors(include_url=False):
        path, given = ".".join(map(str, item["loc"])), item["input"]
        value = f" = {given!r}" if isinstance(given, str | int | float | None) else ""
        for message in item["msg"].split("\n"):
            lines.append(f"  {path}{value}: {message}" if path else f"  {message}")
    more = [f"  ... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)
