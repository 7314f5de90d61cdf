"""The layers of a configuration: class defaults, a profile and a preset or a file, and the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edenrl._files import about_checkpoint, about_rsl_rl
from edenrl.config.base import Config
from edenrl.config.fields import containers, defaults, merge
from edenrl.config.files import read_config


def layered(
    cls: type[Config],
    file: str | None,
    typed: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    profiles: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Class defaults, then the profile and the preset or the file, then what was typed: the later one wins.

    Args:
        cls: the configuration class.
        file: path that was given with ``--config``.
        typed: nested field values of the command line.
        presets: as for ``parse_cli``.
        profiles: as for ``parse_cli``.
    """
    whole, values = containers(cls, dict), defaults(cls)
    resume = typed.get("resume")
    if file is not None and resume is not None:
        raise ValueError("give --config or --resume, not both: a resumed run starts from its own config.json")
    if resume is not None:
        if not resume:
            raise ValueError("--resume is empty; give the directory of an earlier run")
        if typed.get("init_from") is not None:
            raise ValueError("give --resume or --init_from, not both: a resumed run goes on with its own weights")
        folder = Path(os.path.expanduser(resume))
        if about := about_checkpoint(folder):
            raise FileNotFoundError(f"--resume: {about}; for example --resume_checkpoint {folder.name}")
        if not (folder / "config.json").is_file() and (about := about_rsl_rl(folder)):
            raise FileNotFoundError(f"--resume: {about}")
        if not folder.is_dir():
            raise FileNotFoundError(f"--resume {resume}: no such directory; give the directory of an earlier run")
        layer = read_config(folder / "config.json") | {"resume": resume, "run_dir": resume}
    elif file is not None:
        layer = read_config(os.path.expanduser(file))
        if layer.pop("resume", None) is not None:
            layer.pop("run_dir", None)
    else:
        named = merge(values, typed)
        env_name = named.get("env", {}).get("name", "")
        layer = preset_layer(cls, named.get("profile", ""), env_name, presets, profiles)
    return merge(merge(values, layer, whole), typed, whole)


def preset_layer(
    cls: type[Config],
    profile: str,
    env_name: str,
    presets: Mapping[str, Mapping[str, Any]],
    profiles: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The values of a profile, and over them those of the preset of an environment; empty where there is neither."""
    preset: Mapping[str, Any] = {}
    for name, values in presets.items():
        if _env_key(name) == _env_key(env_name):
            preset = values
            break
    return merge(profiles.get(profile, {}), preset, containers(cls, dict))


def _env_key(name: str) -> str:
    return name.lower().removeprefix("gym:")
