"""The quadruped under the other trainer scripts: it trains, or is refused for a reason."""

import json

import pytest
from trainer_cases import load_script

from edenrl.training import read_metrics

pytest.importorskip("mujoco", minversion="3.17")

NAMES = ["Quadruped", "QuadrupedTerrain"]
SHARED = ["--env.num_envs=4", "--env.kwargs.num_threads=1", "--num_threads=1", "--quiet"]


@pytest.mark.parametrize("name", NAMES)
def test_simba_trains_and_is_evaluated(name, tmp_path, capsys):
    groups = ["policy"] if name == "Quadruped" else ["policy", "scan"]
    arguments = [f"--env.name={name}", f"--env.kwargs.groups={json.dumps([*groups, 'critic'])}", *SHARED]
    arguments += ["--algorithm.steps_per_env=8", "--algorithm.actor_dim=8", "--algorithm.critic_dim=8"]
    arguments += ["--algorithm.epochs=1", "--algorithm.num_minibatches=2", "--evaluation.num_episodes=2"]
    arguments += [f"--algorithm.actor_groups={','.join(groups)}", "--env.kwargs.episode_seconds=0.4"]
    load_script("train_simba").main([f"--run_dir={tmp_path}/run", "--total_frames=96", *arguments])
    assert [row["frames"] for row in read_metrics(tmp_path / "run" / "metrics.csv")] == [32, 64, 96]
    load_script("evaluate").main([str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out)["length_max"] <= 20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("script", ["train_amp", "train_him", "train_cmdp", "train_rma"])
def test_the_name_alone_is_enough(name, script, tmp_path):
    arguments = [f"--env.name={name}", *SHARED, "--evaluation.num_episodes=2", "--env.kwargs.episode_seconds=0.4"]
    arguments += ["--algorithm.steps_per_env=8", "--algorithm.epochs=1", "--algorithm.num_minibatches=2"]
    load_script(script).main([f"--run_dir={tmp_path}/run", "--total_frames=64", *arguments])
    assert len(read_metrics(tmp_path / "run" / "metrics.csv")) == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("script", "message"),
    [("train_apg", "cannot be differentiated through"), ("train_grpo", "cannot start several rows in the same state")],
)
def test_others_say_what_the_robot_lacks(name, script, message, tmp_path):
    with pytest.raises(ValueError, match=f"{name} .*{message}"):
        load_script(script).main([f"--run_dir={tmp_path}/run", f"--env.name={name}", *SHARED])
    assert not (tmp_path / "run").exists()
