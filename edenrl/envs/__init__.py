"""Environments: a registry, Gymnasium vectors, adapters, transforms, and the built-in tasks."""

from edenrl.envs.cart_pole import CartPoleSwingUp
from edenrl.envs.conflict import ConflictPointMass
from edenrl.envs.differentiable import DifferentiableEnv, RolloutPlan, ScheduledEnv
from edenrl.envs.groups import SameStateGroups, assert_same_start, repeat_in_groups, set_group_size
from edenrl.envs.gym import GymVectorEnv
from edenrl.envs.hidden_point_mass import HiddenPointMass
from edenrl.envs.learning_env import DifferentiableVecEnv, LearningEnvAdapter, LearningVecEnv
from edenrl.envs.make_gym import make_gym_env
from edenrl.envs.point_mass import PointMass
from edenrl.envs.quadruped import Quadruped, QuadrupedTerrain
from edenrl.envs.random_start import ClockedEnv, RandomStart, SimulatorClock, can_start_late
from edenrl.envs.registry import make_env, register_env, registered_envs
from edenrl.envs.reward_groups import RewardGroups
from edenrl.envs.seeds import process_seed, spawn_seeds
from edenrl.envs.self_resetting import SelfResettingEnv
from edenrl.envs.tensor_state import TensorStateEnv
from edenrl.envs.transforms import (
    ActionMode,
    ClipAction,
    FillFinalObservation,
    FreshTensors,
    action_box,
    action_saturation,
    bound_actions,
    wrap_env,
)
from edenrl.envs.vec_env import VecEnvAdapter
from edenrl.envs.vec_env_view import as_vec_env

__all__ = [
    "ActionMode",
    "CartPoleSwingUp",
    "ClipAction",
    "ClockedEnv",
    "ConflictPointMass",
    "DifferentiableEnv",
    "DifferentiableVecEnv",
    "FillFinalObservation",
    "FreshTensors",
    "GymVectorEnv",
    "HiddenPointMass",
    "LearningEnvAdapter",
    "LearningVecEnv",
    "PointMass",
    "Quadruped",
    "QuadrupedTerrain",
    "RandomStart",
    "RewardGroups",
    "RolloutPlan",
    "SameStateGroups",
    "ScheduledEnv",
    "SelfResettingEnv",
    "SimulatorClock",
    "TensorStateEnv",
    "VecEnvAdapter",
    "action_box",
    "action_saturation",
    "as_vec_env",
    "assert_same_start",
    "bound_actions",
    "can_start_late",
    "make_env",
    "make_gym_env",
    "register_env",
    "registered_envs",
    "repeat_in_groups",
    "set_group_size",
    "process_seed",
    "spawn_seeds",
    "wrap_env",
]

for _env in (CartPoleSwingUp, ConflictPointMass, HiddenPointMass, PointMass, Quadruped, QuadrupedTerrain):
    register_env(_env.__name__, _env, override=True)
