"""The training scripts as tests run them: each with flags that make it tiny, and readers of what a run leaves."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState

from edenrl.config import load_config
from edenrl.training import build_env, load_policy_weights, read_metrics, run_script

EXAMPLES = Path(__file__).parents[2] / "examples"

SHORT = ["--evaluation.num_episodes=4", "--checkpoint.interval_iterations=1000", "--num_threads=1"]
ROLLOUT = ["--env.num_envs=8", "--algorithm.steps_per_env=8", "--algorithm.epochs=2", "--algorithm.num_minibatches=2"]
ACTOR = ["--algorithm.actor_hidden=8"]
PPO = [*ROLLOUT, *ACTOR, "--algorithm.critic_hidden=8", *SHORT]


def load_script(name: str) -> ModuleType:
    """A script of examples/ as a module, under its name: evaluate.py imports the trainer of a run."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


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


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs"


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
        start = [f"--resume={run_dir}"] if resume else [f"--run_dir={run_dir}", *self.flags]
        self.module.main([*start, self.length(iterations), *flags])

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

    def state(self, run_dir: Path | str) -> dict[str, Tensor]:
        """Weights of the policy, and the random state, in the newest checkpoint."""
        policy, rng = self.policy(run_dir), GlobalRNGState()
        before = rng.state_dict()
        Checkpoint(rng=rng).load(newest(run_dir))
        state = {**policy.state_dict(), "rng": torch.get_rng_state()}
        rng.load_state_dict(before)
        return state


class Apg(Script):
    """APG's budget is given in updates."""

    def length(self, iterations: int) -> str:
        return f"--algorithm.updates={iterations}"


_PPO_METRICS = """loss_objective clip_fraction kl_approx loss_entropy entropy loss_critic ESS max_ratio mean_ratio kl
explained_variance grad_norm_policy grad_norm_critic"""
_PPO_CLIPPED = f"{_PPO_METRICS} value_clip_fraction"
_ROBOT = ["--algorithm.symmetry=true"]

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
        [*PPO, "--algorithm.discriminator_hidden=8", "--algorithm.window_buffer_size=300"],
        64,
        f"""{_PPO_CLIPPED} loss_discriminator loss_grad_penalty d_expert d_policy accuracy grad_norm_discriminator
        style_reward style_gate style_share motion_distance""",
    ),
    "HIM": Script(
        "train_him",
        [*PPO, *_ROBOT, "--algorithm.encoder_hidden=8", "--algorithm.target_hidden=8", "--algorithm.latent_dim=4"],
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
}
