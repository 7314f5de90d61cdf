"""The GRPO script as its user meets it: runs, resumes, mistakes, and whether it learns."""

import json
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torchrl.checkpoint import CheckpointError, CheckpointRotation
from torchrl.envs import EnvBase
from trainer_cases import EXAMPLES, TRAINERS, newest, refusals, rows

from edenrl.envs import PointMass, register_env
from edenrl.training import Checkpoints, read_metrics

GRPO = TRAINERS["GRPO"]
train, saved_policy, train_grpo, FRAMES, TINY = GRPO.train, GRPO.policy, GRPO.module, GRPO.frames, GRPO.flags


def saved_reference(run_dir):
    """The frozen policy in the newest checkpoint."""
    reference = saved_policy(run_dir)
    Checkpoints(run_dir, {"reference": reference}, algorithm="GRPO").load(newest(run_dir))
    return reference.state_dict()


def test_steps_behind_the_first_episode_do_not_count(tmp_path, capsys):
    train(tmp_path / "run", 3, "--algorithm.steps_per_env=110", "--checkpoint.interval_iterations=1")
    assert "success" in capsys.readouterr().out
    row = rows(tmp_path / "run")[0]
    # The time limit is at step 100: a tenth of the steps lies behind it.
    assert row["group/counted"] < 0.91 and row["group/nan_rewards"] == 0


@pytest.mark.parametrize("env", ["PointMass", "CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("reset", [True, False])
def test_resumed_run_is_the_uninterrupted_run(tmp_path, env, reset):
    flags = (f"--env.name={env}", f"--algorithm.reset_before_rollout={reset}")
    run_dir = GRPO.whole_like_parts(tmp_path, 12, 5, *flags)
    # The reference is the policy of the beginning, not of the resumption.
    states = [saved_reference(run_dir), saved_policy(run_dir).state_dict()]
    assert not torch.equal(*(state["module.0.module.mlp.0.weight"] for state in states))
    assert rows(run_dir)[-1]["kl_reference"] > 0


def test_resumed_run_in_a_new_process_is_the_uninterrupted_run(tmp_path):
    GRPO.whole_like_parts(tmp_path, 6, 3, in_a_new_process=True)


def test_a_run_without_a_reference_cannot_be_resumed_with_one(tmp_path, capsys):
    train(tmp_path / "run", 2, "--algorithm.kl_coeff=0")
    assert "loss_kl" not in rows(tmp_path / "run")[0]
    train(tmp_path / "run", 3, resume=True)
    message = GRPO.refused(capsys, f"--resume={tmp_path / 'run'}", "--algorithm.kl_coeff=0.02")
    assert "cannot change algorithm.kl_coeff (was 0.0, now 0.02)" in message


class NotTogether(EnvBase):
    """An environment that cannot start several rows in the same state."""

    def __init__(self, num_envs, *, device, seed):
        inner = PointMass(num_envs, device=device, seed=seed)
        super().__init__(device=inner.device, batch_size=inner.batch_size)
        self.inner = inner
        self.observation_spec, self.action_spec = inner.observation_spec.clone(), inner.action_spec.clone()
        self.reward_spec, self.done_spec = inner.reward_spec.clone(), inner.done_spec.clone()

    def _reset(self, tensordict=None, **kwargs):
        return self.inner._reset(tensordict)

    def _step(self, tensordict):
        return self.inner._step(tensordict)

    def _set_seed(self, seed):
        self.inner._set_seed(seed)


class BrokenPromise(PointMass):
    def _reset(self, tensordict=None, **kwargs):
        self.group_size = 1
        return super()._reset(tensordict, **kwargs)


class NaNReward(PointMass):
    """One reward in row 3 cannot be computed."""

    def _step(self, tensordict) -> TensorDict:
        out = super()._step(tensordict)
        out["reward"][3] = out["reward"][3].where(self._state["steps"][3] != 5, float("nan"))
        return out


def test_environments_that_cannot_start_together_are_refused(tmp_path, capsys):
    register_env("NotTogether", NotTogether, override=True)
    message = GRPO.refused(capsys, f"--run_dir={tmp_path / 'a'}", "--env.name=NotTogether", *TINY)
    assert "NotTogether cannot start several rows in the same state" in message
    register_env("BrokenPromise", BrokenPromise, override=True)
    message = GRPO.refused(capsys, f"--run_dir={tmp_path / 'b'}", "--env.name=BrokenPromise", *TINY)
    assert "Row 1 starts with another 'observation' than row 0" in message


def test_a_missing_reward_is_counted_and_never_trained_on(tmp_path):
    register_env("NaNReward", NaNReward, override=True)
    train(tmp_path / "run", 3, "--env.name=NaNReward")
    for row in rows(tmp_path / "run"):
        # The five steps whose return contains it are lost, of 64.
        assert row["group/nan_rewards"] == 1 and row["group/counted"] == pytest.approx(59 / 64)
    assert all(value.isfinite().all() for value in saved_policy(tmp_path / "run").state_dict().values())


@refusals(
    """
    --env.num_envs=10 --algorithm.group_size=4 -> set env.num_envs to 8 or 12, or algorithm.group_size to 2 or 5
    --algorithm.group_size=1 -> algorithm.group_size
    --algorithm.kl_coef=0.1 -> --algorithm.kl_coeff
    --collector=multi_sync -> GRPO collects in one process
    --env.name=CartPole-v1 --algorithm.action_bound_coeff=1.0 -> needs a Gaussian actor
    """
)
def test_mistakes_name_the_fix(refuses, flags, expected):
    refuses(GRPO, [*TINY, *flags], expected)


def test_a_run_of_another_algorithm_is_refused(tmp_path):
    train(tmp_path / "run", 2)
    path = CheckpointRotation(tmp_path / "run" / "checkpoints", keep_last=1).latest()
    with pytest.raises(CheckpointError, match="'GRPO'"):
        Checkpoints(tmp_path, {"policy": saved_policy(tmp_path / "run")}, algorithm="PPO").load(path)


def test_cart_pole_improves(tmp_path):
    size = ("--env.num_envs=16", "--algorithm.steps_per_env=200", "--total_frames=25600")
    quick = ("--checkpoint.interval_iterations=1000", "--evaluation.num_episodes=8", "--num_threads=1", "--quiet")
    train_grpo.main([f"--run_dir={tmp_path / 'run'}", "--env.name=CartPole-v1", *size, *quick])
    table = read_metrics(tmp_path / "run" / "metrics.csv")
    # Seeds 1 and 2: 22 to 111 and to 138 of the sampling policy, 310 and 173 of the deterministic one.
    assert table[-1]["episode/return"] >= 3 * table[0]["episode/return"]
    assert table[-1]["eval/return_mean"] >= 100


def train_and_evaluate(run_dir, *flags):
    command = [
        sys.executable,
        EXAMPLES / "train_grpo.py",
        "--run_dir",
        run_dir,
        "--quiet",
        "--num_threads",
        "1",
        *flags,
    ]
    subprocess.run(command, check=True)
    command = [sys.executable, EXAMPLES / "evaluate.py", run_dir, "--json", "--checkpoint", "latest", "--seed", "777"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_cart_pole_is_solved(tmp_path, seed):
    assert train_and_evaluate(tmp_path / "run", "--env.name", "CartPole-v1", "--seed", seed)["return_mean"] >= 450
