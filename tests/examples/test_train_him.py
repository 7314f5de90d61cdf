"""The HIM script: resumption, both orders of a stack, refusals, evaluation and export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Unbounded
from trainer_cases import PPO, Script, load_script, refusals, rows

from edenrl.envs import PointMass, register_env
from edenrl.export import PolicySpec, load_policy
from edenrl.modules import SignedPermutation

TINY = [
    *PPO,
    "--algorithm.encoder_hidden=8",
    "--algorithm.target_hidden=8",
    "--algorithm.latent_dim=4",
    "--algorithm.num_prototypes=6",
    "--env.name=Stacked",
]
HIM = Script("train_him", TINY, 64)
train, train_him, policy_of, FRAMES = HIM.train, HIM.module, HIM.policy, HIM.frames
# Left and right of a point mass: its y coordinates change their sign (any signs will do for a script).
SIGNS = [1.0, -1.0] * 7


class Stacked(PointMass):
    """PointMass with a "history" of three frames (14 each) and a "critic" of one frame and three more entries."""

    def __init__(
        self, num_envs: int, *, newest_first: bool = False, declared: bool = True, filled: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(num_envs, **kwargs)
        self.filled = filled  # at a reset, with the first frame
        whole = self.observation_spec.pop("observation")
        for name, width in (("history", 42), ("critic", 17)):
            self.observation_spec[name] = Unbounded((num_envs, width), device=whole.device)
        self.newest_first = newest_first
        if declared:
            self.history_layout = "newest_first" if newest_first else "oldest_first"
        self.mirrors = {
            "history": SignedPermutation(range(42), SIGNS * 3),
            "critic": SignedPermutation(range(17), [*SIGNS, 1, -1, 1]),
            "action": SignedPermutation([0, 1], [1, -1]),
        }

    def _stack(self, out: TensorDict, fresh: bool = False) -> TensorDict:
        frame = out.pop("observation")
        frames = 3 * [frame] if fresh and self.filled else [0.5 * frame, 0.7 * frame, frame]
        out["history"] = torch.cat(frames[::-1] if self.newest_first else frames, -1)
        return out.set("critic", torch.cat([frame, 2 * frame[..., :3]], -1))

    def _step(self, tensordict: TensorDict) -> TensorDict:
        return self._stack(super()._step(tensordict))

    def _reset(self, tensordict: TensorDict | None) -> TensorDict:
        return self._stack(super()._reset(tensordict), fresh=True)


@pytest.fixture(autouse=True)
def stacked() -> None:
    register_env("Stacked", lambda n, **kw: Stacked(n, **kw), override=True)


@pytest.mark.parametrize("schedule", ["adaptive", "linear"])
@pytest.mark.parametrize("symmetry", ["true", "false"])
def test_resumed_run_is_the_uninterrupted_run(tmp_path: Path, schedule: str, symmetry: str) -> None:
    flags = (f"--algorithm.symmetry={symmetry}", f"--algorithm.lr_schedule={schedule}")
    HIM.whole_like_parts(tmp_path, 6, 4, *flags, dies=True)


def test_a_restarted_schedule_leads_the_estimator_too(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    train(tmp_path / "run", 3, "--resume_schedule=restart", "--algorithm.lr_schedule=constant",
          "--algorithm.lr=3e-4", resume=True)  # fmt: skip
    assert rows(tmp_path / "run")[-1]["lr"] == pytest.approx(3e-4)


def test_both_orders_give_the_same_training_when_declared_right(tmp_path: Path) -> None:
    train(tmp_path / "oldest", 3, "--algorithm.symmetry=true")
    train(tmp_path / "newest", 3, "--algorithm.symmetry=true", "--env.kwargs.newest_first=true")
    train(tmp_path / "told", 3, "--algorithm.symmetry=true", "--env.kwargs.declared=false",
          "--algorithm.history_layout=oldest_first")  # fmt: skip
    assert rows(tmp_path / "oldest") == rows(tmp_path / "newest") == rows(tmp_path / "told")


def test_what_is_logged_are_means_over_mini_batches_and_fresh_rollouts(tmp_path: Path) -> None:
    """One pass over a rollout in two halves, with steps too small to matter: their mean is the rollout's own loss."""
    still = ("--algorithm.epochs=1", "--algorithm.lr=1e-12", "--algorithm.lr_schedule=constant")
    train(tmp_path / "still", 2, *still)
    row = rows(tmp_path / "still")[0]
    assert row["loss_estimation"] == pytest.approx(row["fresh/loss_estimation"], rel=1e-5)
    train(tmp_path / "run", 2, "--algorithm.symmetry=true")
    row = rows(tmp_path / "run")[0]
    for name in ("loss_swap", "loss_estimation", "velocity_error", "prototype_entropy", "latent_variance"):
        assert row[name] >= 0 and row[f"fresh/{name}"] >= 0
    for name in ("loss_actor_symmetry", "loss_critic_symmetry", "equivariance_error", "grad_norm_estimator"):
        assert row[name] > 0


@refusals(
    """
    --env.kwargs.declared=false -> set history_layout to 'oldest_first'
    --algorithm.history_layout=newest_first -> the environment declares 'oldest_first'
    --algorithm.normalize_observations=true -> expected false: the estimator learns the raw
    --algorithm.actor_groups=history,critic -> expected one group, got 2
    --algorithm.actor_groups=critic --algorithm.critic_groups=history -> 'critic' has 17 entries
    --algorithm.critic_groups=critics -> Groups of this environment: {'history': 42, 'critic': 17}
    --env.name=PointMass -> Groups of this environment: {'observation': 14}
    --env.name=PointMass -> ['history', 'critic'] are missing
    --algorithm.num_prototypes=1 -> algorithm.num_prototypes = '1'
    --algorithm.target_skip_dim=14 -> target_skip_dim=14 was given
    --algorithm.num_prototype=3 -> closest: --algorithm.num_prototypes
    """
)
def test_mistakes_name_the_fix(refuses: Any, flags: list[str], expected: str) -> None:
    refuses(HIM, [*TINY, *flags], expected)


def test_a_wrong_declaration_fails_at_the_first_rollout(tmp_path: Path, capsys: Any) -> None:
    flags = ["--env.kwargs.declared=false", "--algorithm.history_layout=newest_first", f"--run_dir={tmp_path / 'run'}"]
    message = HIM.refused(capsys, *TINY, "--env.name=Stacked", *flags)
    assert "declared newest_first, but the critic's frame is closest to frame 2 of 3" in message
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_wrong_declaration_fails_when_the_first_rollout_is_too_short_to_show_it(tmp_path: Path, capsys: Any) -> None:
    flags = ["--env.kwargs.declared=false", "--algorithm.history_layout=newest_first", "--env.kwargs.filled=true"]
    flags += ["--algorithm.steps_per_env=1", "--total_frames=16", f"--run_dir={tmp_path / 'run'}"]
    message = HIM.refused(capsys, *TINY, "--env.name=Stacked", *flags)
    assert "declared newest_first, but the critic's frame is closest to frame 2 of 3" in message


def test_evaluation_and_export_find_the_script_of_the_run(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    train(tmp_path / "run", 2, "--quiet", "--export")
    monkeypatch.setitem(sys.modules, "train_him", train_him)
    load_script("evaluate").main([str(tmp_path / "run"), "--json", "--checkpoint", "latest"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 4
    spec = PolicySpec.model_validate_json((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    assert spec.model.verification is not None
    exported, policy = load_policy(tmp_path / "run" / "policy"), policy_of(tmp_path / "run")
    history = torch.randn(5, 42)
    with torch.no_grad():
        expected = policy.get_dist(TensorDict(history=history, batch_size=[5])).mean
    np.testing.assert_allclose(exported(history.numpy()), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_on_the_robot_the_velocity_is_found_and_the_actor_becomes_symmetric(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    train_him.main([f"--run_dir={tmp_path / 'run'}", "--total_frames=140000", "--quiet", "--num_threads=1"])
    table = rows(tmp_path / "run")
    assert np.mean([row["fresh/velocity_error_relative"] for row in table[-5:]]) < 0.6
    assert np.mean([row["equivariance_error"] for row in table[-5:]]) < 0.1 * table[0]["equivariance_error"]
