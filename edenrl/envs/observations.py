"""Observation groups: the names they may have, and the groups that nested entries become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["BESIDE_GROUPS", "RESERVED_NAMES", "as_groups", "check_group_names", "leaf_spaces"]

BESIDE_GROUPS = frozenset(
    {
        "episode_reward",
        "final_obs_missing",
        "is_init",
        "late_start",
        "metrics",
        "noise",
        "noise_steps",
        "reward_groups",
        "step_count",
    }
)
"""Root entries that an environment or its transforms publish beside the observation groups."""

RESERVED_NAMES = BESIDE_GROUPS | {
    # TorchRL, at every step
    "action",
    "collector",
    "done",
    "next",
    "reward",
    "terminated",
    "truncated",
    # policies
    "action_log_prob",
    "loc",
    "logits",
    "pre_squash_action",
    "scale",
    "student_action",
    "teacher_action",
    # advantages, replay and losses
    "advantage",
    "elapsed",
    "group_mask",
    "group_return",
    "objective_scale",
    "reward_channels",
    "state_value",
    "steps_to_next_obs",
    "style_reward",
    "value_target",
}
"""Names that no observation group may have, because something else is written under them."""


def check_group_names(owner: str, names: Iterable[str]) -> None:
    """Refuse observation groups whose entries something else would overwrite or drop.

    Args:
        owner: the environment, for the message.
        names: names of its groups.

    Raises:
        ValueError: a name is reserved, or begins with an underscore: TorchRL's collectors drop such entries.

    Examples:
        >>> check_group_names("MyRobot", ["policy", "last_action"])
    """
    if clash := sorted(name for name in names if name in RESERVED_NAMES or name.startswith("_")):
        raise ValueError(
            f"{owner} has observation groups named {clash}. These names are taken: the library writes its own entries "
            f"under them. Rename the groups in the environment, for example {clash[0]!r} to 'observed_"
            f"{clash[0].lstrip('_')}'."
        )


def as_groups(owner: str, observation: Mapping[Any, Any] | TensorDictBase) -> dict[str, Tensor]:
    """The observation groups in a dictionary of tensors, which may hold further dictionaries.

    A nested entry is named by its path, with dots. A vector of integers or flags becomes float32, so that networks can
    read it. Images keep their type.

    Args:
        owner: the environment, for the message.
        observation: tensors ``[N, *]``.

    Raises:
        TypeError: an entry is neither a tensor nor a dictionary.
        ValueError: two entries get the same name.

    Examples:
        >>> observation = {"robot": {"q": torch.zeros(2, 3)}, "mode": torch.ones(2, 1, dtype=torch.int)}
        >>> groups = as_groups("MyRobot", observation)
        >>> {name: value.dtype for name, value in groups.items()}
        {'robot.q': torch.float32, 'mode': torch.float32}
    """
    groups: dict[str, Tensor] = {}
    for key, value in observation.items():
        if isinstance(value, (Mapping, TensorDictBase)):
            found = {f"{key}.{name}": leaf for name, leaf in as_groups(owner, value).items()}
        elif not isinstance(value, Tensor):
            raise TypeError(
                f"{owner} returned an observation {key!r} of type {type(value).__name__}; expected a tensor, or a dict "
                "of tensors."
            )
        elif value.dim() == 2 and not value.is_floating_point():
            found = {key: value.to(torch.float32)}
        else:
            found = {key: value}
        _refuse_twice(owner, groups, found)
        groups |= found
    return groups


def leaf_spaces(owner: str, space: spaces.Dict) -> dict[str, tuple[tuple[str, ...], spaces.Space]]:
    """The entries of a dictionary space that are no dictionaries: name (the path, with dots) -> (path, space).

    Args:
        owner: the environment, for the message.
        space: the space; its entries may be dictionary spaces, too.

    Raises:
        ValueError: two entries get the same name.

    Examples:
        >>> space = spaces.Dict(robot=spaces.Dict(q=spaces.Box(-1, 1, (3,))))
        >>> leaf_spaces("MyRobot", space)
        {'robot.q': (('robot', 'q'), Box(-1.0, 1.0, (3,), float32))}
    """
    leaves: dict[str, tuple[tuple[str, ...], spaces.Space]] = {}
    for key, entry in space.spaces.items():
        if isinstance(entry, spaces.Dict):
            below = leaf_spaces(owner, entry).items()
            found = {f"{key}.{name}": ((key, *path), leaf) for name, (path, leaf) in below}
        else:
            found = {key: ((key,), entry)}
        _refuse_twice(owner, leaves, found)
        leaves |= found
    return leaves


def _refuse_twice(owner: str, known: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if twice := sorted(known.keys() & found.keys()):
        raise ValueError(
            f"{owner} has two observation entries that would both be the group {twice[0]!r}: a nested entry is named "
            "by its path, with dots. Rename one of them."
        )
