"""Collection of experience."""

from edenrl.collectors.differentiable import AdjointClip, DifferentiableCollector
from edenrl.collectors.make import make_collector
from edenrl.collectors.motion import MotionDataset, WindowBuffer
from edenrl.collectors.rollout import Collector

__all__ = [
    "AdjointClip",
    "Collector",
    "DifferentiableCollector",
    "MotionDataset",
    "WindowBuffer",
    "make_collector",
]
