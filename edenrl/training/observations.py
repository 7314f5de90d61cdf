"""What the observations of a run consist of, and how those of an environment differ from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torchrl.data import Composite
from torchrl.envs import EnvBase

from edenrl._files import write_atomic
from edenrl.export.contract import declared

__all__ = ["changed_observations", "describe_observations", "save_observations"]

_FILE = "observations.json"


def describe_observations(env: EnvBase) -> dict[str, dict[str, Any]]:
    """Width of every floating-point group, and the terms and frames that the environment declares for it.

    Args:
        env: the environment as its simulator made it.

    Returns:
        ``{"width": features, "frames": stacked frames, "terms": {name: width}}`` by group.

    Examples:
        >>> from edenrl.envs import PointMass
        >>> described = describe_observations(PointMass(2))["observation"]
        >>> described["width"], described["terms"]["obstacle radii"]
        (14, 2)
    """
    try:
        contract = declared(env)
    except ValueError:  # what is not readable is no reason to stop a training; exporting refuses it
        contract = None
    out = {}
    for key, leaf in env.observation_spec.items():
        if isinstance(leaf, Composite) or not leaf.dtype.is_floating_point:
            continue
        terms = [] if contract is None else contract.observations.get(key, [])
        history = None if contract is None else contract.histories.get(key)
        out[key] = {
            "width": math.prod(leaf.shape[len(env.batch_size) :]),
            "frames": 1 if history is None else history.frames,
            "terms": {term.name: term.width for term in terms},
        }
    return out


def save_observations(run_dir: Path, described: dict[str, dict[str, Any]]) -> None:
    """Writes what ``describe_observations`` returned into a run directory."""
    write_atomic(run_dir / _FILE, json.dumps(described, indent=2) + "\n")


def changed_observations(run_dir: Path, described: dict[str, dict[str, Any]]) -> str:
    """A sentence about the groups whose widths are no longer those of a run, with a space in front; or nothing.

    Args:
        run_dir: the run directory; without a description in it there is nothing to say.
        described: what ``describe_observations`` says of the environment of today.
    """
    try:
        saved = json.loads((run_dir / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    parts = []
    for key in dict.fromkeys([*saved, *described]):
        if key not in described:
            parts.append(f"the group {key!r} ({saved[key]['width']}) is gone")
        elif key not in saved:
            parts.append(f"the group {key!r} ({described[key]['width']}) is new")
        elif described[key]["width"] != saved[key]["width"]:
            parts.append(_changed_group(key, saved[key], described[key]))
    return f" The environment has changed since the run: {'; '.join(parts)}." if parts else ""


def _changed_group(key: str, saved: dict[str, Any], now: dict[str, Any]) -> str:
    """What became of one group."""
    parts = []
    if saved["frames"] != now["frames"]:
        parts.append(f"it stacks {now['frames']} frames instead of {saved['frames']}")
    for name in dict.fromkeys([*saved["terms"], *now["terms"]]):
        before, after = saved["terms"].get(name), now["terms"].get(name)
        if before is None:
            parts.append(f"the term {name!r} ({after}) is new")
        elif after is None:
            parts.append(f"the term {name!r} ({before}) is gone")
        elif before != after:
            parts.append(f"the term {name!r} has {after} instead of {before}")
    why = f" ({', '.join(parts)})" if parts else ""
    return f"the group {key!r} has {now['width']} features instead of {saved['width']}{why}"
