"""The training scripts as tests run them: each with flags that make it tiny, and readers of what a run leaves.

``python trainer_cases.py NAME [FLAG...]`` runs a script in a process that knows the environments of the tests.
"""

from __future__ import annotations

import functools
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from depth_task import DepthTask
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import Checkpoint, CheckpointRotation

from edenrl.config import load_config
from edenrl.envs import register_env
from edenrl.training import build_env, load_policy_weights, read_metrics, run_script

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"

SHORT = ["--evaluation.num_episodes=4", "--checkpoint.interval_iterations=1000", "--num_threads=1"]
ROLLOUT = ["--env.num_envs=8", "--algorithm.steps_per_env=8", "--algorithm.epochs=2", "--algorithm.num_minibatches=2"]
ACTOR = ["--algorithm.actor_hidden=8"]
PPO = [*ROLLOUT, *ACTOR, "--algorithm.critic_hidden=8", *SHORT]
PATIENCE = 180  # seconds until a process that hangs fails its test


def load_script(name: str) -> ModuleType:
    """A script of examples/ as a module."""
    return importlib.import_module(name)


def rows(run_dir: Path | str) -> list[dict[str, float]]:
    """Metrics without wall time and without evaluations, whose iterations depend on the length of the run."""
    table = read_metrics(Path(run_dir) / "metrics.csv")
    return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("eval/")} for row in table]


def newest(run_dir: Path | str) -> Path:
    """The newest checkpoint."""
    return CheckpointRotation(Path(run_dir) / "checkpoints", keep_last=1).latest()


def hide_newest(run_dir: Path | str) -> None:
    """Takes the newest checkpoint away, as if the process had died before it was complete."""
    path = newest(run_dir)
    path.rename(path.with_name(f".{path.name}.stage-1"))


def read_component(run_dir: Path | str, name: str) -> Any:
    """The state of one component of the newest checkpoint."""

    class Reader:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    reader = Reader()
    Checkpoint(**{name: reader}).load(newest(run_dir))
    return reader.state


def checkpointed(run_dir: Path | str) -> dict[str, Any]:
    """The state of every component of the newest checkpoint: networks, optimizers, collector, random numbers."""
    names = Checkpoint.manifest(newest(run_dir))["components"]
    states = {name: read_component(run_dir, name) for name in names}
    states["run"] = {name: value for name, value in states["run"].items() if name != "elapsed"}  # wall time
    return states


def assert_same(a: Any, b: Any, name: str = "state") -> None:
    """Bit for bit: tensors, numbers and whatever nests them."""
    if isinstance(a, (dict, TensorDictBase)):
        assert set(a.keys()) == set(b.keys()), name
        for key in a.keys():
            assert_same(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), name
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_same(*pair, f"{name}.{index}")
    elif isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)), f"{name} differs"
    else:
        assert repr(a) == repr(b), f"{name} differs"


def wait_for(process: subprocess.Popen[str], begun: Callable[[], bool]) -> None:
    """Waits until a process has come so far; fails when it ends before that or takes minutes."""
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if begun():
            return
        time.sleep(0.02)
    process.kill()
    pytest.fail(f"the run never came so far:\n{process.communicate()[0]}")


def refusals(table: str) -> pytest.MarkDecorator:
    """Parametrizes a test with lines of ``FLAG... -> what the message must hold``."""
    cases = [line.split("->", 1) for line in table.strip().splitlines()]
    return pytest.mark.parametrize(
        ("flags", "expected"), [(shlex.split(flags), expected.strip()) for flags, expected in cases]
    )


class Script:
    """One training script.

    Args:
        name: the script, such as "train_ppo".
        flags: what makes a run tiny.
        frames: environment steps per iteration.
        metrics: columns of metrics.csv that are the algorithm's own.
    """

    def __init__(self, name: str, flags: list[str], frames: int, metrics: str = "") -> None:
        self.name, self.flags, self.frames, self.metrics = name, flags, frames, set(metrics.split())
        self.module = load_script(name)

    def length(self, iterations: int) -> str:
        """The flag for so many iterations."""
        return f"--total_frames={iterations * self.frames}"

    def train(self, run_dir: Path | str, iterations: int, *flags: str, resume: bool = False) -> None:
        """Trains in this process, or goes on."""
        start = [f"--resume={run_dir}"] if resume else [*self.flags, f"--run_dir={run_dir}"]
        self.module.main([*start, self.length(iterations), *flags])

    def launch(self, run_dir: Path, iterations: int, *flags: str, new_session: bool = False) -> subprocess.Popen[str]:
        """Trains in a process of its own, or goes on where there is a run already.

        In a session of its own a signal can reach the process and its workers as a terminal's Ctrl-C does.
        """
        exists = (run_dir / "config.json").exists()
        start = [f"--resume={run_dir}"] if exists else [*self.flags, f"--run_dir={run_dir}"]
        command = [sys.executable, __file__, self.name, *start, self.length(iterations), *flags]
        path = os.pathsep.join([str(EXAMPLES), str(TESTS), os.environ.get("PYTHONPATH", "")])
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=new_session,
        )

    def whole_like_parts(
        self, folder: Path, iterations: int, cut: int, *flags: str, dies: bool = False, in_a_new_process: bool = False
    ) -> Path:
        """Trains one run at a stretch and one in two parts; they must be the same, bit for bit.

        Args:
            folder: where the two runs go.
            iterations: the length of both.
            cut: the second run stops after so many iterations.
            flags: flags of both.
            dies: the second run has the full length from the start. It dies after the last checkpoint of every
                ``cut`` iterations. Schedules that know the length of a run need this.
            in_a_new_process: where the second run goes on.

        Returns:
            The run at a stretch.
        """
        whole, parts = folder / "whole", folder / "parts"
        self.train(whole, iterations, *flags)
        if dies:
            self.train(parts, iterations, f"--checkpoint.interval_iterations={cut}", *flags)
            hide_newest(parts)
        else:
            self.train(parts, cut, *flags)
        if in_a_new_process:
            process = self.launch(parts, iterations)
            output = process.communicate(timeout=PATIENCE)[0]
            assert process.returncode == 0, output
        else:
            self.train(parts, iterations, resume=True)
        assert len(rows(whole)) == iterations and rows(whole) == rows(parts)
        assert_same(checkpointed(whole), checkpointed(parts))
        return whole

    def refused(self, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
        """The message with which a run is refused, as its user sees it."""
        with pytest.raises(SystemExit) as stopped:
            run_script(lambda: self.module.main(list(flags)))
        message = capsys.readouterr().err
        assert stopped.value.code in (1, 2) and len(message.splitlines()) <= 24 and "Traceback" not in message
        return message

    def policy(self, run_dir: Path | str, checkpoint: str = "latest") -> Any:
        """The policy of a checkpoint, rebuilt from the run's configuration alone."""
        cfg = load_config(self.module.Train, Path(run_dir) / "config.json")
        policy = self.module.make_policy(cfg, build_env(cfg, num_envs=1))
        load_policy_weights(policy, run_dir, checkpoint)
        return policy


class Apg(Script):
    """APG's budget is given in updates."""

    def length(self, iterations: int) -> str:
        return f"--algorithm.updates={iterations}"


class Distillation(Script):
    """Starts from a run of RMA, which is trained when it is first asked for."""

    @functools.cached_property
    def teacher(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="teacher-")
        self._folder = folder  # removed with this object
        small = ["--algorithm.scan_hidden=8,4", "--algorithm.priv_hidden=8,6", "--algorithm.estimator_hidden=8"]
        flags = [*PPO, *small, "--env.name=DepthTask", "--env.num_envs=4", "--quiet", "--total_frames=96"]
        load_script("train_rma").main([f"--run_dir={folder.name}/teacher", *flags])
        return Path(folder.name) / "teacher"

    @property
    def flags(self) -> list[str]:
        return [str(self.teacher), *self._flags]

    @flags.setter
    def flags(self, flags: list[str]) -> None:
        self._flags = flags


_PPO_METRICS = """loss_objective clip_fraction kl_approx loss_entropy entropy loss_critic ESS max_ratio mean_ratio kl
explained_variance grad_norm_policy grad_norm_critic"""
_PPO_CLIPPED = f"{_PPO_METRICS} value_clip_fraction"
_ROBOT = ["--env.kwargs.episode_seconds=0.4", "--env.kwargs.num_threads=1"]

TRAINERS = {
    "PPO": Script("train_ppo", PPO, 64, _PPO_METRICS),
    "SimBa": Script(
        "train_simba",
        [*ROLLOUT, "--algorithm.actor_dim=8", "--algorithm.critic_dim=8", *SHORT],
        64,
        _PPO_METRICS,
    ),
    "AMP": Script(
        "train_amp",
        [*PPO, *_ROBOT, "--algorithm.discriminator_hidden=8", "--algorithm.window_buffer_size=300"],
        64,
        f"""{_PPO_CLIPPED} loss_discriminator loss_grad_penalty d_expert d_policy accuracy grad_norm_discriminator
        style_reward style_gate style_share motion_distance""",
    ),
    "HIM": Script(
        "train_him",
        [
            *PPO,
            *_ROBOT,
            "--algorithm.encoder_hidden=8",
            "--algorithm.target_hidden=8",
            "--algorithm.latent_dim=4",
        ],
        64,
        f"""{_PPO_CLIPPED} loss_actor_symmetry loss_critic_symmetry equivariance_error loss_swap loss_estimation
        velocity_error velocity_error_relative prototype_entropy latent_variance grad_norm_estimator fresh/loss_swap
        fresh/loss_estimation fresh/velocity_error fresh/velocity_error_relative fresh/prototype_entropy
        fresh/latent_variance""",
    ),
    "RMA": Script(
        "train_rma",
        [*PPO, "--algorithm.priv_hidden=6,3", "--algorithm.estimator_hidden=8", "--algorithm.dagger_update_freq=3"],
        64,
        f"""{_PPO_METRICS} loss_estimator loss_priv_reg latent_distance priv_reg_weight grad_norm_estimator loss_dagger
        grad_norm_history""",
    ),
    "CMDP": Script(
        "train_cmdp",
        [*PPO, "--env.kwargs.max_steps=12", "--algorithm.warmup_iters=2", "--algorithm.vg_window=20"],
        64,
        f"{_PPO_METRICS} lambda task_weight task_return task_return_best task_ratio",
    ),
    "GRPO": Script(
        "train_grpo",
        [*ROLLOUT, *ACTOR, "--algorithm.group_size=4", "--algorithm.kl_coeff=0.02", *SHORT],
        64,
        """loss_objective loss_entropy loss_kl clip_fraction kl kl_approx kl_reference entropy ESS max_ratio mean_ratio
        grad_norm_policy group/return group/zero_spread group/counted group/nan_rewards""",
    ),
    "APG": Apg(
        "train_apg",
        ["--env.num_envs=8", "--algorithm.mode=segment", "--algorithm.segment_length=4", *ACTOR, *SHORT],
        32,
        "loss_objective objective entropy alive_fraction grad_norm_policy skipped_large",
    ),
    "FlashSAC": Script(
        "train_flashsac",
        [
            "--profile=cpu",
            "--env.num_envs=4",
            "--algorithm.steps_per_env=5",
            "--algorithm.min_buffer=20",
            "--algorithm.buffer_size=160",
            "--algorithm.batch_size=8",
            "--algorithm.updates_per_step=1",
            "--algorithm.actor_dim=4",
            "--algorithm.critic_dim=4",
            "--algorithm.num_bins=11",
            *SHORT,
        ],
        20,
        """loss_actor loss_critic loss_temperature entropy alpha q_value target_value grad_norm_policy grad_norm_critic
        replay_size""",
    ),
    "Distillation": Distillation(
        "distill_rma",
        ["--algorithm.steps_per_env=10", "--algorithm.depth_hidden=8", *SHORT],
        40,
        """loss_action loss_yaw delta_yaw_ok_frac grad_norm_student_actor grad_norm_depth_backbone
        grad_norm_depth_recurrent""",
    ),
}
register_env("DepthTask", DepthTask, override=True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    run_script(lambda: load_script(sys.argv[1]).main(sys.argv[2:]))
