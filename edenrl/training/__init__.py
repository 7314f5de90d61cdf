"""What every training script shares: runs, checkpoints, logging, progress and evaluation."""

from edenrl.training.checkpoint import Checkpoints, load_policy_weights, load_weights
from edenrl.training.checkpoint_folder import has_checkpoint, require_run
from edenrl.training.environment import (
    append_primers,
    build_env,
    collector_options,
    declared_mirrors,
    evaluate_run,
    make_critic,
    make_policy,
    symmetry_mirrors,
)
from edenrl.training.evaluation import evaluate
from edenrl.training.exporting import export_run
from edenrl.training.loggers import MetricsTable, RunLogger, read_metrics
from edenrl.training.metrics import average, rollout_metrics
from edenrl.training.minibatches import minibatches
from edenrl.training.optimization import follow_rate
from edenrl.training.progress import Progress, format_table
from edenrl.training.reports import run_script
from edenrl.training.run import Run
from edenrl.training.speedups import check_precision, speedups
from edenrl.training.startup import setup

__all__ = [
    "Checkpoints",
    "MetricsTable",
    "Progress",
    "Run",
    "RunLogger",
    "append_primers",
    "average",
    "build_env",
    "check_precision",
    "evaluate",
    "evaluate_run",
    "export_run",
    "follow_rate",
    "format_table",
    "has_checkpoint",
    "load_policy_weights",
    "load_weights",
    "make_critic",
    "make_policy",
    "minibatches",
    "read_metrics",
    "require_run",
    "rollout_metrics",
    "run_script",
    "setup",
    "speedups",
    "symmetry_mirrors",
    "collector_options",
    "declared_mirrors",
]
