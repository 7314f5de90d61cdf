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

from edenrl.envs import PointMass, VecEnvAdapter, as_vec_env, register_env
from edenrl.export import PolicySpec, load_policy
from edenrl.modules import SignedPermutation
from edenrl.training import minibatches

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
        self,
        num_envs: int,
        *,
        newest_first: bool = False,
        declared: bool = True,
        filled: bool = False,
        unmirrored: tuple[str, ...] = (),
        wrong: str | None = None,
        **kwargs: Any,
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
        for name in unmirrored:
            del self.mirrors[name]
        if wrong is not None:
            self.mirrors[wrong] = SignedPermutation(range(5))

    def _stack(self, out: TensorDict, fresh: bool = False) -> TensorDict:
        frame = out.pop("observation")
        frames = 3 * [frame] if fresh and self.filled else [0.5 * frame, 0.7 * frame, frame]
        out["history"] = torch.cat(frames[::-1] if self.newest_first else frames, -1)
        return out.set("critic", torch.cat([frame, 2 * frame[..., :3]], -1))

    def _step(self, tensordict: TensorDict) -> TensorDict:
        return self._stack(super()._step(tensordict))

    def _reset(self, tensordict: TensorDict | None) -> TensorDict:
        return self._stack(super()._reset(tensordict), fresh=True)


class Blind:
    """An environment in the style of rsl_rl that keeps the last observations of episodes to itself."""

    def __init__(self, env: Any) -> None:
        self.view = as_vec_env(env)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)

    def step(self, actions: torch.Tensor) -> Any:
        *rest, extras = self.view.step(actions)
        return *rest, {name: value for name, value in extras.items() if name != "final_observations"}


@pytest.fixture(autouse=True)
def stacked() -> None:
    register_env("Stacked", lambda n, **kw: Stacked(n, **kw), override=True)
    register_env("Blind", lambda n, **kw: VecEnvAdapter(Blind(Stacked(n, **kw))), override=True)


@pytest.mark.parametrize("schedule", ["adaptive", "linear"])
@pytest.mark.parametrize("symmetry", ["true", "false"])
def test_resumed_run_is_the_uninterrupted_run(tmp_path: Path, schedule: str, symmetry: str) -> None:
    switches = [f"--algorithm.{name}={symmetry}" for name in ("mirror_data", "symmetry_loss")]
    flags = (*switches, f"--algorithm.lr_schedule={schedule}")
    HIM.whole_like_parts(tmp_path, 6, 4, *flags, dies=True)


def test_a_restarted_schedule_leads_the_estimator_too(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    train(tmp_path / "run", 3, "--resume_schedule=restart", "--algorithm.lr_schedule=constant",
          "--algorithm.lr=3e-4", resume=True)  # fmt: skip
    assert rows(tmp_path / "run")[-1]["lr"] == pytest.approx(3e-4)


def test_both_orders_give_the_same_training_when_declared_right(tmp_path: Path) -> None:
    train(tmp_path / "oldest", 3)
    train(tmp_path / "newest", 3, "--env.kwargs.newest_first=true")
    train(tmp_path / "told", 3, "--env.kwargs.declared=false",
          "--algorithm.history_layout=oldest_first")  # fmt: skip
    assert rows(tmp_path / "oldest") == rows(tmp_path / "newest") == rows(tmp_path / "told")


def test_what_is_logged_are_means_over_mini_batches_and_fresh_rollouts(tmp_path: Path) -> None:
    """One pass over a rollout in two halves, with steps too small to matter: their mean is the rollout's own loss."""
    still = (
        "--algorithm.mirror_data=false",
        "--algorithm.epochs=1",
        "--algorithm.lr=1e-12",
        "--algorithm.lr_schedule=constant",
    )
    train(tmp_path / "still", 2, *still)
    row = rows(tmp_path / "still")[0]
    assert row["loss_estimation"] == pytest.approx(row["fresh/loss_estimation"], rel=1e-5)
    train(tmp_path / "run", 2)
    row = rows(tmp_path / "run")[0]
    for name in ("loss_swap", "loss_estimation", "velocity_error", "prototype_entropy", "latent_variance"):
        assert row[name] >= 0 and row[f"fresh/{name}"] >= 0
    for name in ("loss_actor_symmetry", "loss_critic_symmetry", "equivariance_error", "grad_norm_estimator"):
        assert row[name] > 0


BOTH, DATA, LOSS, NONE = (True, True), (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], BOTH),
        (["--algorithm.mirror_data=false"], LOSS),
        (["--algorithm.symmetry_loss=false"], DATA),
        (["--algorithm.mirror_data=false", "--algorithm.symmetry_loss=false"], NONE),
        (["--algorithm.mirror_data=true", "--algorithm.symmetry_loss=true"], BOTH),
        (['--env.kwargs.unmirrored=["history","critic","action"]'], NONE),
        (['--env.kwargs.unmirrored=["critic"]'], NONE),
        (['--env.kwargs.unmirrored=["action"]', "--algorithm.mirror_data=false"], NONE),
    ],
)
def test_mirror_data_and_symmetry_losses_are_two_switches(
    tmp_path: Path, monkeypatch: Any, flags: list[str], expected: tuple[bool, bool]
) -> None:
    rows_trained: list[int] = []

    def spy(data: Any, *args: Any) -> Any:
        rows_trained.append(len(data))
        return minibatches(data, *args)

    monkeypatch.setattr(train_him, "minibatches", spy)
    train(tmp_path / "run", 1, *flags)
    assert rows_trained == [16 if expected[0] else 8]
    assert ("loss_actor_symmetry" in rows(tmp_path / "run")[0]) == expected[1]


@refusals(
    """
    --algorithm.mirror_data=true '--env.kwargs.unmirrored=["critic"]' -> algorithm.mirror_data needs a mirror for ['critic']
    --algorithm.symmetry_loss=true '--env.kwargs.unmirrored=["critic","action"]' -> algorithm.symmetry_loss needs a mirror for ['critic', 'action']
    --algorithm.symmetry_loss=true '--env.kwargs.unmirrored=["history"]' -> Stacked declares them for ['action', 'critic']
    --env.kwargs.wrong=history -> mirror of 'history' has 5 entries, and 'history' has 42
    --env.kwargs.wrong=critic -> mirror of 'critic' has 5 entries, and 'critic' has 17
    --env.kwargs.wrong=action --algorithm.mirror_data=false -> mirror of 'action' has 5 entries, and 'action' has 2
    """  # noqa: E501
)
def test_mirrors_that_are_missing_or_do_not_fit_are_refused(refuses: Any, flags: list[str], expected: str) -> None:
    refuses(HIM, [*TINY, *flags], expected)


BLIND = ["--env.name=Blind", "--algorithm.history_layout=oldest_first", "--env.kwargs.max_steps=6"]


def test_hidden_last_observations_are_refused_unless_accepted(tmp_path: Path, capsys: Any) -> None:
    message = HIM.refused(capsys, *TINY, *BLIND, f"--run_dir={tmp_path / 'run'}", "--total_frames=1000")
    assert "does not give the last observation of" in message
    assert "--algorithm.accept_missing_final_observations true" in message
    train(tmp_path / "accepted", 2, *BLIND, "--algorithm.accept_missing_final_observations=true")
    assert len(rows(tmp_path / "accepted")) == 2


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
