"""Collection of experience."""

from edenrl.collectors.differentiable import AdjointClip, DifferentiableCollector
from edenrl.collectors.distillation import DepthDistillationCollector
from edenrl.collectors.make import make_collector
from edenrl.collectors.rollout import Collector

__all__ = ["AdjointClip", "Collector", "DepthDistillationCollector", "DifferentiableCollector", "make_collector"]
