"""Exporting the policy of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase

from edenrl._files import disk_space
from edenrl.config import RunConfig
from edenrl.envs import wrap_env
from edenrl.export import check_formats, export_policy, nominal_env
from edenrl.training.checkpoint import load_policy_weights
from edenrl.training.environment import append_primers, build_env

__all__ = ["export_run", "require_export"]

_FORMATS = ("onnx", "jit")
# Verification steps them; a few rows find a mix-up of rows and cost nothing.
_ROWS = 4


def export_run(
    cfg: RunConfig,
    policy: TensorDictModuleBase,
    run_dir: str | Path,
    out_dir: str | Path | None = None,
    *,
    checkpoint: str = "best",
    formats: Sequence[str] = _FORMATS,
    verify: bool = True,
) -> dict[str, Path]:
    """Exports a run's policy with the weights of one of its checkpoints; see ``edenrl.export.export_policy``.

    Args:
        cfg: the run's configuration; its environment is built anew, in its nominal state.
        policy: a policy of the run's architecture; it is copied and keeps its own weights.
        run_dir: the run directory.
        out_dir: default ``run_dir/policy``.
        checkpoint: "best", "latest", or a checkpoint's path.
        formats: as for ``export_policy``.
        verify: as for ``export_policy``.

    Returns:
        The files by format, and the spec under "spec".

    Raises:
        FileNotFoundError: for a run without checkpoints.
        ImportError: if a package of a format is missing or cannot be imported, before anything is built.
        CheckpointError: if the checkpoint does not fit the policy.
        DiskFullError: if the disk has no room for the files.
    """
    check_formats(formats, verify=verify)
    target = Path(run_dir) / "policy" if out_dir is None else Path(out_dir)
    loaded = copy.deepcopy(policy)
    # In this process: what the environment declares cannot be read from others.
    cfg = cfg.model_copy(update={"env": cfg.env.model_copy(update={"vectorization": "sync"})})
    env = build_env(cfg, next(loaded.parameters()).device, num_envs=_ROWS)
    try:
        path = load_policy_weights(loaded, run_dir, checkpoint, env=env)
        env = append_primers(wrap_env(nominal_env(env), **cfg.env.action_options()), loaded)
        with disk_space(target, "the exported policy"):
            return export_policy(
                loaded,
                env,
                target,
                formats=formats,
                checkpoint=path,
                task=cfg.env.name,
                task_kwargs=cfg.env.kwargs,
                verify=verify,
            )
    finally:
        env.close(raise_if_closed=False)


def require_export(components: Mapping[str, Any] | None = None) -> None:
    """Refuses ``--export`` before training when it could not work after it.

    Args:
        components: the parts of the run; None: they are not built yet, and only the packages are checked.
    """
    check_formats(_FORMATS)
    if components is not None and "policy" not in components:
        raise ValueError(
            f"export=True exports the run's component 'policy', and this run has {sorted(components)}. Name the policy "
            "so, or leave --export out and call edenrl.export.export_policy."
        )
