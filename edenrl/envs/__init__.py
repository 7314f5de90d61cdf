"""Environments: a registry, Gymnasium vectors, transforms, and the built-in tasks."""

from edenrl.envs.gym import GymVectorEnv, make_gym_env
from edenrl.envs.point_mass import PointMass
from edenrl.envs.quadruped import Quadruped, QuadrupedTerrain
from edenrl.envs.registry import make_env, register_env, registered_envs
from edenrl.envs.transforms import ActionMode, ClipAction, FreshTensors, action_box, action_saturation, wrap_env

__all__ = [
    "ActionMode",
    "ClipAction",
    "FreshTensors",
    "GymVectorEnv",
    "PointMass",
    "Quadruped",
    "QuadrupedTerrain",
    "action_box",
    "action_saturation",
    "make_env",
    "make_gym_env",
    "register_env",
    "registered_envs",
    "wrap_env",
]

register_env("PointMass", PointMass, override=True)
register_env("Quadruped", Quadruped, override=True)
register_env("QuadrupedTerrain", QuadrupedTerrain, override=True)
