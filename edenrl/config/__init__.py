"""Run configuration: typed, validated, saved as JSON, and read from the command line.

Every value is checked where it enters, and a mistake is answered with the dotted name of the field, the value that was
given and what to change. This package does not import torch.
"""

from edenrl.config.base import Config
from edenrl.config.cli import load_config, parse_cli, save_config
from edenrl.config.ppo import PPOConfig
from edenrl.config.presets import QUADRUPED, QUADRUPED_TERRAIN
from edenrl.config.run import CheckpointConfig, EnvConfig, EvaluationConfig, LoggerConfig, RunConfig

__all__ = [
    "QUADRUPED",
    "QUADRUPED_TERRAIN",
    "CheckpointConfig",
    "Config",
    "EnvConfig",
    "EvaluationConfig",
    "LoggerConfig",
    "PPOConfig",
    "RunConfig",
    "load_config",
    "parse_cli",
    "save_config",
]
