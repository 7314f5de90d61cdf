"""What a run says when it begins and when it ends: the table of a good end, the message of a bad one."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torchrl.checkpoint import CheckpointError

from edenrl import distributed
from edenrl._files import write_atomic
from edenrl.training.checkpoint_files import DamagedCheckpointError
from edenrl.training.checkpoint_folder import has_checkpoint
from edenrl.training.progress import format_table

if TYPE_CHECKING:
    from edenrl.training.run import Run

__all__ = ["run_banner", "run_script", "run_summary", "run_table", "save_error", "starting_point"]


def run_banner(run: Run) -> str:
    """The table that a run begins with: what trains what, on what, for how long, and where it is written."""
    env, processes = run.cfg.env, distributed.world_size()
    total = run.iterations * run.frames_per_iteration
    rows: dict[str, Any] = {"device": run.device, "environment": env.name}
    rows["environments"] = f"{env.num_envs:,}" if processes == 1 else f"{env.num_envs:,} in each of {processes}"
    rows["networks"] = _networks(run.components)
    rows[run.unit] = f"{total:,} in {run.iterations:,} iterations of {run.frames_per_iteration:,}"
    if run.evaluations.measures:
        interval = run.evaluations.interval
        rows["evaluation"] = "every iteration" if interval == 1 else f"every {interval:,} iterations and at the end"
        if run.evaluations.budget is not None:
            rows["evaluation"] += ", less often where that takes over a tenth of the time"
    rows["run directory"] = run.dir
    return format_table(rows, run.algorithm)


def _networks(components: Mapping[str, Any]) -> str:
    """Networks with the number of their parameters; those that share all of them with an earlier one are left out."""
    counted: set[nn.Parameter] = set()
    shown = []
    for name, component in components.items():
        own = {*component.parameters()} - counted if isinstance(component, nn.Module) else set()
        if own:
            counted |= own
            shown.append(f"{name} {sum(parameter.numel() for parameter in own):,}")
    return f"{', '.join(shown)} parameters" if shown else "none"


def starting_point(run: Run, resumed: bool) -> list[str]:
    """What a run says about where it starts.

    Args:
        run: the run.
        resumed: whether it goes on from a checkpoint.
    """
    lines = [] if run.initial is None else [run.initial.report()]
    if resumed and run.remaining:
        lines.append(f"Resumed {run.dir} at iteration {run.iteration} of {run.iterations}.")
        if later := run.folder.checkpoints.later(run.iteration):
            lines.append(f"When the run saves its next checkpoint, it removes {', '.join(later)}.")
    elif resumed:
        lines.append(f"{run.dir} is complete. To train it further, ask for more {run.unit} (--total_frames).")
    elif run.cfg.resume is not None:
        lines.append(f"{run.dir} has no checkpoint yet: starting from the beginning with its config.json.")
    if run.evaluations.metric_is_unknown:
        name = run.cfg.evaluation.metric
        lines.append(f"Whether evaluations measure evaluation.metric {name!r} is seen at the first one.")
    return lines


def run_summary(run: Run) -> dict[str, Any]:
    """What a run has reached, as numbers and texts; see ``Run.summary_dict``."""
    done, total = (count * run.frames_per_iteration for count in (run.iteration, run.iterations))
    checkpoint = run.folder.checkpoints.best() or run.folder.checkpoints.latest()
    return {
        "algorithm": run.algorithm,
        "environment": run.cfg.env.name,
        "complete": not run.remaining,
        "unit": run.unit,
        "done": done,
        "total": total,
        "seconds": run.seconds,
        "rate": run.folder.rate,
        "evaluation": dict(run.evaluations.latest),
        "best_checkpoint": None if checkpoint is None else str(checkpoint),
        "exported": {name: str(path) for name, path in run.exported.items()},
        "run_dir": str(run.dir),
    }


def run_table(run: Run) -> str:
    """The table that a run ends with."""
    summary = run_summary(run)
    unit = summary["unit"]
    rows: dict[str, Any] = {
        unit: f"{summary['done']:,} of {summary['total']:,}",
        "wall time": f"{summary['seconds']:.0f} s ({summary['rate']:,.0f} {unit}/s)",
        **_evaluation_rows(summary["evaluation"]),
        "best checkpoint": summary["best_checkpoint"] or "none yet",
    }
    if summary["exported"]:
        rows["exported policy"] = run.exported["spec"].parent
    rows["run directory"] = run.dir
    if run.remaining:
        rows["continue with"] = _resume_command(run.dir)
    return format_table(rows, f"{summary['algorithm']} on {summary['environment']}")


def _evaluation_rows(result: Mapping[str, float]) -> dict[str, str]:
    """Rows of the final table for an evaluation; none for an empty one."""
    if not result:
        return {}
    rows = {
        "evaluation": f"{result['episodes']:.0f} episodes of the deterministic policy",
        "return": (
            f"{result['return_mean']:.2f} +- {result['return_std']:.2f}, median {result['return_median']:.2f}, "
            f"min {result['return_min']:.2f}, max {result['return_max']:.2f}"
        ),
        "episode length": f"{result['length_mean']:.1f}",
    }
    if "success_rate" in result:
        rows["success"] = f"{100 * result['success_rate']:.1f} %"
    return rows


def _resume_command(run_dir: Path) -> str:
    """The command line that continues a run of this script."""
    processes = distributed.world_size()
    launcher = "python" if processes == 1 else f"torchrun --nproc_per_node {processes}"
    return f"{launcher} {shlex.quote(sys.argv[0])} --resume {shlex.quote(str(run_dir))}"


def save_error(error: BaseException, run_dir: Path, where: str) -> None:
    """Writes the traceback into the run directory, and notes on the error what ``run_script`` says about it.

    Args:
        error: what ended the run; anything but an ``Exception`` (Ctrl-C, an exit) leaves no report.
        run_dir: the run directory.
        where: how far the run had come, such as "iteration 3 of 10".
    """
    if not isinstance(error, Exception):
        vars(error)["edenrl_run_dir"] = run_dir
        return
    rank = distributed.rank()
    path = run_dir / ("error.txt" if rank == 0 else f"error-{rank}.txt")
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    report = where.partition(" of ")[0]
    with contextlib.suppress(OSError):  # a full disk must not hide the error
        write_atomic(path, f"{where.capitalize()}\n{''.join(lines)}")
        report += f"; the full traceback is in {path}"
    if has_checkpoint(run_dir) and not isinstance(error, DamagedCheckpointError):
        report += f"; continue with {_resume_command(run_dir)}"
    vars(error)["edenrl_report"] = report


def run_script(main: Callable[[], Any]) -> None:
    """Runs a script's ``main``; foreseen errors end in one readable message and exit status 1.

    Set ``EDENRL_TRACEBACK=1`` for the full traceback; an error within a run also leaves it in ``RUN/error.txt``.
    """
    try:
        with distributed.failing_together():
            main()
    except (ValueError, KeyError, FloatingPointError, ImportError, OSError, RuntimeError) as error:
        if os.environ.get("EDENRL_TRACEBACK") == "1":
            raise
        foreseen = isinstance(error, CheckpointError) or not isinstance(error, RuntimeError)
        if not foreseen:
            raise
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        if " " not in text:  # a key, or nothing at all, says little without its kind
            text = f"{type(error).__name__}: {text}"
        who = f"process {distributed.rank()}: " if distributed.world_size() > 1 else ""
        where = vars(error).get("edenrl_report", "EDENRL_TRACEBACK=1 shows where it came from")
        print(f"{who}error: {text}\n({where})", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt as error:
        run_dir = vars(error).get("edenrl_run_dir")
        command = "--resume RUN_DIR" if run_dir is None else _resume_command(run_dir)
        print(f"Stopped at once; continue from the last checkpoint with {command}", file=sys.stderr)
        raise SystemExit(130) from None
