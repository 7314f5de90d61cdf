"""Environments: a registry, Gymnasium vectors, transforms, and the built-in tasks."""

from edenrl.envs.groups import SameStateGroups, assert_same_start, repeat_in_groups, set_group_size
from edenrl.envs.gym import GymVectorEnv, make_gym_env
from edenrl.envs.point_mass import PointMass
from edenrl.envs.registry import make_env, register_env, registered_envs
from edenrl.envs.transforms import ActionMode, ClipAction, FreshTensors, action_box, action_saturation, wrap_env

__all__ = [
    "ActionMode",
    "ClipAction",
    "FreshTensors",
    "GymVectorEnv",
    "PointMass",
    "SameStateGroups",
    "action_box",
    "action_saturation",
    "assert_same_start",
    "make_env",
    "make_gym_env",
    "register_env",
    "registered_envs",
    "repeat_in_groups",
    "set_group_size",
    "wrap_env",
]

register_env("PointMass", PointMass, override=True)
