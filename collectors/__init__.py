"""Collection of experience."""

from edenrl.collectors.make import make_collector
from edenrl.collectors.rollout import Collector

__all__ = ["Collector", "make_collector"]
