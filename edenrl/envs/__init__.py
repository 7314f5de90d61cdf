"""Environments: a registry, Gymnasium vectors, adapters, transforms, and the built-in tasks."""

from edenrl.envs.gym import GymVectorEnv, make_gym_env
from edenrl.envs.learning_env import DifferentiableVecEnv, LearningEnvAdapter, LearningVecEnv
from edenrl.envs.point_mass import PointMass
from edenrl.envs.registry import make_env, register_env, registered_envs
from edenrl.envs.self_resetting import SelfResettingEnv
from edenrl.envs.transforms import (
    ActionMode,
    ClipAction,
    FillFinalObservation,
    FreshTensors,
    action_box,
    action_saturation,
    wrap_env,
)
from edenrl.envs.vec_env import VecEnvAdapter, as_vec_env

__all__ = [
    "ActionMode",
    "ClipAction",
    "DifferentiableVecEnv",
    "FillFinalObservation",
    "FreshTensors",
    "GymVectorEnv",
    "LearningEnvAdapter",
    "LearningVecEnv",
    "PointMass",
    "SelfResettingEnv",
    "VecEnvAdapter",
    "action_box",
    "action_saturation",
    "as_vec_env",
    "make_env",
    "make_gym_env",
    "register_env",
    "registered_envs",
    "wrap_env",
]

register_env("PointMass", PointMass, override=True)
