"""One robot for every algorithm: a batched MuJoCo quadruped on flat ground and on terrain."""

from edenrl.envs.quadruped.groups import GROUPS, group_mirrors, mirror_joints
from edenrl.envs.quadruped.model import DEFAULT_POSE, JOINT_NAMES, LEGS, build_model, model_xml
from edenrl.envs.quadruped.on_terrain import QuadrupedTerrain
from edenrl.envs.quadruped.quadruped import Quadruped
from edenrl.envs.quadruped.randomization import RANDOMIZATION
from edenrl.envs.quadruped.rewards import REWARD_WEIGHTS
from edenrl.envs.quadruped.terrain import TERRAIN_KINDS, Course, DepthCamera, HeightField, build_course
from edenrl.envs.quadruped.trot import save_trot_clips, trot_clip

__all__ = [
    "DEFAULT_POSE",
    "GROUPS",
    "JOINT_NAMES",
    "LEGS",
    "RANDOMIZATION",
    "REWARD_WEIGHTS",
    "TERRAIN_KINDS",
    "Course",
    "DepthCamera",
    "HeightField",
    "Quadruped",
    "QuadrupedTerrain",
    "build_course",
    "build_model",
    "group_mirrors",
    "mirror_joints",
    "model_xml",
    "save_trot_clips",
    "trot_clip",
]
