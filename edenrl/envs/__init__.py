"""Environments: a registry, Gymnasium vectors, transforms, and the built-in tasks."""

from edenrl.envs.cart_pole import CartPoleSwingUp
from edenrl.envs.differentiable import DifferentiableEnv, RolloutPlan, ScheduledEnv
from edenrl.envs.gym import GymVectorEnv, make_gym_env
from edenrl.envs.point_mass import PointMass
from edenrl.envs.registry import make_env, register_env, registered_envs
from edenrl.envs.tensor_state import TensorStateEnv
from edenrl.envs.transforms import ActionMode, ClipAction, FreshTensors, action_box, action_saturation, wrap_env

__all__ = [
    "ActionMode",
    "CartPoleSwingUp",
    "ClipAction",
    "DifferentiableEnv",
    "FreshTensors",
    "GymVectorEnv",
    "PointMass",
    "RolloutPlan",
    "ScheduledEnv",
    "TensorStateEnv",
    "action_box",
    "action_saturation",
    "make_env",
    "make_gym_env",
    "register_env",
    "registered_envs",
    "wrap_env",
]

register_env("PointMass", PointMass, override=True)
register_env("CartPoleSwingUp", CartPoleSwingUp, override=True)
