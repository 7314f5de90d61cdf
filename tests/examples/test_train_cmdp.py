"""The script of constrained PPO: resumption, its constraint, evaluation, export and refusals."""

import json

import pytest
from torchrl.checkpoint import Checkpoint
from trainer_cases import TRAINERS, Script, load_script, newest, read_component, refusals, rows

from edenrl.config import CMDPConfig, load_config, parse_cli, presets
from edenrl.modules import TaskConstraint
from edenrl.training import run_script

TINY = [*TRAINERS["CMDP"].flags, "--algorithm.warmup_iters=4"]
CMDP = Script("train_cmdp", TINY, 64)
train, train_cmdp = CMDP.train, CMDP.module
PLAIN = [flag for flag in TINY if not flag.startswith("--env.kwargs")]


def final_state(run_dir):
    """Weights and constraint of the newest checkpoint."""
    cfg, policy = load_config(train_cmdp.Train, run_dir / "config.json"), CMDP.policy(run_dir)
    constraint = TaskConstraint(**cfg.algorithm.constraint_options())
    Checkpoint(constraint=constraint).load(newest(run_dir))
    return {**policy.state_dict(), **{f"constraint.{k}": v for k, v in constraint.state_dict().items()}}


# Checkpoints during warm-up, and after it in the middle of an episode (12 steps, 8 an iteration) and of the window.
@pytest.mark.parametrize("cut", [3, 11])
def test_resumed_run_is_the_uninterrupted_run(tmp_path, cut):
    whole = CMDP.whole_like_parts(tmp_path, 18, cut)
    constraint = read_component(whole, "constraint")
    # 144 steps in each of 8 environments, of which the first episode is shortened and does not count.
    assert int(constraint["updates"]) == 18 and int(constraint["episodes"]) == 11 * 8


def test_the_columns_tell_the_constraint(tmp_path):
    train(
        tmp_path / "run",
        9,
        "--algorithm.warmup_iters=4",
        "--algorithm.alpha=0.5",
        "--algorithm.lambda_lr=0.3",
        "--env.reward_scale=0.1",
        "--env.random_start=false",
    )
    table = rows(tmp_path / "run")
    assert [row["task_weight"] for row in table[:4]] == [1.0] * 4 and table[4]["task_weight"] == 0.5
    # A row holds what its update used; episodes end in the second, third, fifth, sixth and eighth iteration.
    ended = [row["episode/count"] for row in table]
    assert ended == [0.0, 8.0, 8.0, 0.0, 8.0, 8.0, 0.0, 8.0, 8.0]
    assert table[2]["task_return"] == pytest.approx(table[1]["episode/task_return"], rel=1e-5)
    for before, row in zip(table[5:], table[6:], strict=False):
        weight = 1 / (1 + pow(2.718281828, -row["lambda"]))
        assert row["task_weight"] == pytest.approx(weight, abs=1e-5)
        # The dual step after an update shows in the next row, with the ratio that it was taken at.
        step = 0.3 * (0.5 - row["task_ratio"])
        assert row["lambda"] - before["lambda"] == pytest.approx(step, abs=1e-5)
    groups = sum(table[2][f"episode/{name}_return"] for name in ("task", "style", "penalty"))
    assert groups == pytest.approx(table[2]["episode/return"], rel=1e-4)


def test_other_scripts_read_the_run_and_its_newest_policy_is_the_one(tmp_path, capsys):
    train(tmp_path / "run", 6, "--quiet", "--export", "--evaluation.interval_iterations=2")
    assert (tmp_path / "run" / "policy" / "policy_spec.json").exists()
    load_script("evaluate").main([str(tmp_path / "run"), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["checkpoint"].endswith("6") and result["episodes"] == 4
    assert {"task_return", "style_return", "penalty_return"} <= result.keys()
    load_script("export_policy").main([str(tmp_path / "run"), "--formats", "jit"])


@refusals(
    """
    --algorithm.alpha=1.2 -> algorithm.alpha = '1.2'
    --algorithm.warmup_iters=-1 -> algorithm.warmup_iters = '-1'
    --algorithm.vg_window=0 -> algorithm.vg_window = '0'
    --algorithm.normalize_advantage=minibatch -> algorithm.normalize_advantage = 'minibatch'
    --algorithm.alhpa=0.9 -> --algorithm.alpha
    --env.name=PointMass -> exactly ['task', 'style', 'penalty']
    --env.name=Quadruped '--env.kwargs={"groups": ["policy"]}' -> among --env.kwargs.groups
    """
)
def test_mistakes_name_the_fix(refuses, flags, expected):
    refuses(CMDP, [*(PLAIN if "Quadruped" in flags[0] else TINY), *flags], expected)


def test_the_constraint_of_a_run_cannot_change(tmp_path, capsys):
    train(tmp_path / "run", 2)
    with pytest.raises(SystemExit):
        run_script(lambda: train(tmp_path / "run", 4, "--algorithm.alpha=0.5", resume=True))
    assert "cannot change algorithm.alpha (was 0.9, now 0.5)" in capsys.readouterr().err


def test_defaults_and_presets():
    cfg = CMDPConfig()
    assert (cfg.steps_per_env, cfg.epochs, cfg.num_minibatches, cfg.lr, cfg.entropy_coeff) == (16, 10, 16, 5e-4, 1e-3)
    assert cfg.actor_hidden == cfg.critic_hidden == (256, 256, 128) and cfg.lr_schedule == "adaptive"
    expected = dict(alpha=0.9, lambda_lr=0.05, lambda_init=0.0, warmup_iters=0, vg_window=100, vg_star_window=20)
    assert cfg.constraint_options() == expected
    for name in presets.CMDP:
        assert parse_cli(train_cmdp.Train, ["--env.name", name], presets=presets.CMDP).algorithm.name == "cmdp"


def test_quadruped_trains(tmp_path):
    flags = [
        "--env.name=Quadruped",
        "--env.num_envs=4",
        "--env.kwargs.num_threads=1",
        "--env.kwargs.episode_seconds=0.2",
    ]
    train_cmdp.main([*PLAIN, *flags, f"--run_dir={tmp_path}/run", "--total_frames=128"])
    last = rows(tmp_path / "run")[-1]
    # Energy and smoothness cost, tracking does not.
    assert last["episode/style_return"] < 0 < last["episode/task_return"]
