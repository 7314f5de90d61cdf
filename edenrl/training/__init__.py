"""What every training script shares: runs, checkpoints, logging, progress and evaluation."""

from edenrl.training.checkpoint import Checkpoints, load_policy_weights, load_weights
from edenrl.training.environment import (
    append_primers,
    build_env,
    collector_options,
    evaluate_run,
    make_critic,
    make_policy,
)
from edenrl.training.evaluation import evaluate
from edenrl.training.exporting import export_run
from edenrl.training.loggers import MetricsTable, RunLogger, read_metrics
from edenrl.training.progress import Progress, format_table
from edenrl.training.run import Run, average, rollout_metrics, run_script, setup
from edenrl.training.speedups import check_precision, speedups

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
    "collector_options",
    "evaluate",
    "evaluate_run",
    "export_run",
    "format_table",
    "load_policy_weights",
    "load_weights",
    "make_critic",
    "make_policy",
    "read_metrics",
    "rollout_metrics",
    "run_script",
    "setup",
    "speedups",
]
