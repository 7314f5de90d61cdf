"""Collection of experience."""

from edenrl.collectors.builtin_motion import load_motion
from edenrl.collectors.differentiable import AdjointClip, DifferentiableCollector
from edenrl.collectors.distillation import DepthDistillationCollector
from edenrl.collectors.exploration import RepeatedNoise, exploring_policy
from edenrl.collectors.make import make_collector
from edenrl.collectors.make_replay import make_replay
from edenrl.collectors.motion import MotionDataset
from edenrl.collectors.replay import NStepReplayBuffer
from edenrl.collectors.reward_normalizer import RewardNormalizer
from edenrl.collectors.rollout import Collector
from edenrl.collectors.window_buffer import WindowBuffer

__all__ = [
    "AdjointClip",
    "Collector",
    "DepthDistillationCollector",
    "DifferentiableCollector",
    "MotionDataset",
    "WindowBuffer",
    "NStepReplayBuffer",
    "RepeatedNoise",
    "RewardNormalizer",
    "exploring_policy",
    "load_motion",
    "make_collector",
    "make_replay",
]
