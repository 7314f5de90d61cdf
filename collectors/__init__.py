"""Collection of experience."""

from edenrl.collectors.rollout import Collector

__all__ = ["Collector"]
