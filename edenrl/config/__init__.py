"""Run configuration: typed, validated, saved as JSON, and read from the command line.

Every value is checked when it is given. The error names the field by its dotted name, the value that was given and what
to change. This package does not import torch.
"""

from edenrl.config import presets
from edenrl.config.amp import AMPConfig
from edenrl.config.apg import APGConfig
from edenrl.config.base import Config
from edenrl.config.cli import parse_cli
from edenrl.config.cmdp import CMDPConfig
from edenrl.config.distill import DepthDistillationConfig
from edenrl.config.files import load_config, read_config, save_config
from edenrl.config.flashsac import FlashSACConfig, FlashSACRunConfig
from edenrl.config.grpo import GRPOConfig
from edenrl.config.him import HIMConfig
from edenrl.config.ppo import PPOConfig
from edenrl.config.resume import refuse_changes
from edenrl.config.rma import RMAConfig
from edenrl.config.run import CheckpointConfig, EnvConfig, EvaluationConfig, LoggerConfig, RunConfig
from edenrl.config.simba import SimbaPPOConfig

__all__ = [
    "AMPConfig",
    "APGConfig",
    "CMDPConfig",
    "CheckpointConfig",
    "Config",
    "DepthDistillationConfig",
    "EnvConfig",
    "EvaluationConfig",
    "FlashSACConfig",
    "FlashSACRunConfig",
    "GRPOConfig",
    "HIMConfig",
    "LoggerConfig",
    "PPOConfig",
    "RMAConfig",
    "RunConfig",
    "SimbaPPOConfig",
    "load_config",
    "parse_cli",
    "presets",
    "read_config",
    "refuse_changes",
    "save_config",
]
