"""What the quadruped can publish: names, widths and mirror images of its observation groups."""

from __future__ import annotations

from collections.abc import Iterable

from edenrl.modules import SignedPermutation

__all__ = ["GROUPS", "SCAN_X", "SCAN_Y", "group_mirrors", "mirror_joints"]

GROUPS = (
    "policy",
    "critic",
    "history",
    "prop",
    "scan",
    "priv_explicit",
    "priv_latent",
    "prop_history",
    "amp",
    "reward_groups",
    "depth",
    "metrics",
)

AMP_FRAMES = 5
# Around the trunk, in m, along its heading: further ahead than behind.
SCAN_X = tuple(round(-0.45 + 0.15 * i, 2) for i in range(12))
SCAN_Y = tuple(round(-0.75 + 0.15 * i, 2) for i in range(11))
POLICY_WIDTH, CRITIC_WIDTH, PROP_WIDTH = 45, 48, 53

_Map = tuple[list[int], list[float]]


def _joined(parts: Iterable[_Map]) -> _Map:
    index: list[int] = []
    sign: list[float] = []
    for part_index, part_sign in parts:
        index += [len(sign) + i for i in part_index]
        sign += part_sign
    return index, sign


def _signs(*sign: float) -> _Map:
    return list(range(len(sign))), list(sign)


# Leg order FL, FR, RL, RR; abduction angles change their sign.
_FEET: _Map = ([1, 0, 3, 2], [1.0] * 4)
_JOINTS: _Map = ([3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8], [-1.0, 1.0, 1.0] * 4)
_GAINS: _Map = (_JOINTS[0], [1.0] * 12)
_VECTOR, _ANGULAR, _COMMAND = _signs(1, -1, 1), _signs(-1, 1, -1), _signs(1, -1, -1)
_SCAN: _Map = (
    [x * len(SCAN_Y) + y for x in range(len(SCAN_X)) for y in reversed(range(len(SCAN_Y)))],
    [1.0] * (len(SCAN_X) * len(SCAN_Y)),
)
_POLICY = _joined([_COMMAND, _ANGULAR, _VECTOR, _JOINTS, _JOINTS, _JOINTS])
_PROP = _joined(
    [_ANGULAR, _signs(-1, 1, 1, -1, -1), _COMMAND, _signs(1, 1), _JOINTS, _JOINTS, _JOINTS, _FEET]
)  # roll, pitch, zero, yaw to this and to the next way-point


def mirror_joints() -> SignedPermutation:
    """The left-right mirror of joint angles, velocities, torques and actions, in the order of ``JOINT_NAMES``."""
    return SignedPermutation(*_JOINTS)


def group_mirrors(groups: Iterable[str], history: int, prop_history: int) -> dict[str, SignedPermutation]:
    """Left-right mirrors of the keys that some groups publish, and of ``action``.

    Args:
        groups: of ``GROUPS``.
        history: frames of ``history``.
        prop_history: frames of ``prop_history``.

    Examples:
        >>> from edenrl.envs.quadruped.groups import group_mirrors
        >>> sorted(group_mirrors(["policy", "amp"], 6, 10))
        ['action', 'amp_gate', 'amp_window', 'policy']
    """
    maps: dict[str, dict[str, _Map]] = {
        "policy": {"policy": _POLICY},
        "critic": {"critic": _joined([_POLICY, _VECTOR])},
        "history": {"history": _joined([_POLICY] * history)},
        "prop": {"prop": _PROP},
        "scan": {"scan": _SCAN},
        "priv_explicit": {"priv_explicit": _joined([_VECTOR, _signs(1), _FEET, _signs(1)])},
        "priv_latent": {"priv_latent": _joined([_signs(1), _VECTOR, _signs(1), _GAINS, _GAINS])},
        "prop_history": {"prop_history": _joined([_PROP] * prop_history)},
        "amp": {"amp_window": _joined([_JOINTS] * AMP_FRAMES), "amp_gate": _signs(1)},
        # Images are mirrored along their columns.
        "depth": {"depth": (list(reversed(range(87))), [1.0] * 87), "delta_yaw_ok": _signs(1)},
    }
    keys = {key: entry for group in groups for key, entry in maps.get(group, {}).items()}
    return {key: SignedPermutation(*entry) for key, entry in (keys | {"action": _JOINTS}).items()}
