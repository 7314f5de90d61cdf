"""Showing a run's policy, the arguments of the scripts that read runs, and the quadruped under training."""

import json
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from trainer_cases import EXAMPLES, load_script, rows

from edenrl.envs import PointMass, register_env, registry

pytest.importorskip("mujoco", minversion="3.17")
imageio = pytest.importorskip("imageio")

TINY = ["--env.num_envs=4", "--evaluation.num_episodes=1", "--num_threads=1", "--checkpoint.interval_iterations=2"]
FRAMES = 4 * 24


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "robot"
    arguments = [f"--run_dir={folder}", "--env.name=Quadruped", f"--total_frames={2 * FRAMES}", "--quiet", *TINY]
    load_script("train_ppo").main(arguments)
    return folder


def test_writes_an_animation(run_dir, capsys):
    load_script("play").main([str(run_dir), "--lines", "--seconds", "0.4"])
    frames = imageio.mimread(run_dir / "play.gif")
    assert len(frames) == 10 and frames[0].shape[:2] == (360, 480)
    assert (frames[0] != frames[-1]).any()
    assert "10 frames" in capsys.readouterr().out


def test_shows_a_student_that_carries_a_state(tmp_path):
    small = ["--env.num_envs=2", "--evaluation.num_episodes=1", "--num_threads=1", "--quiet"]
    short = ["--env.kwargs.episode_seconds=0.4", '--env.kwargs.kinds=["rough"]', "--algorithm.steps_per_env=10"]
    teacher = [f"--run_dir={tmp_path / 'teacher'}", "--env.name=QuadrupedTerrain", "--total_frames=20", *short, *small]
    load_script("train_rma").main([*teacher, "--algorithm.dagger_update_freq=1", "--algorithm.epochs=1"])
    student = [str(tmp_path / "teacher"), f"--run_dir={tmp_path / 'student'}", "--total_frames=20", *small]
    load_script("distill_rma").main([*student, "--algorithm.steps_per_env=5", "--algorithm.depth_hidden=8"])
    load_script("play").main([str(tmp_path / "student"), "--lines", "--seconds", "0.2"])
    assert len(imageio.mimread(tmp_path / "student" / "play.gif")) == 5


def test_draws_lines_where_there_is_no_opengl(run_dir, tmp_path, capsys, monkeypatch):
    play = load_script("play")

    def no_context(env):
        raise RuntimeError("no display")

    monkeypatch.setattr(play, "Rendered", no_context)
    play.main([str(run_dir), "--output", str(tmp_path / "a.gif"), "--seconds", "0.2"])
    assert len(imageio.mimread(tmp_path / "a.gif")) == 5
    assert "RuntimeError: no display" in capsys.readouterr().err


SMALL = ["--env.num_envs=4", "--evaluation.num_episodes=1", "--num_threads=1", "--total_frames=96", "--quiet"]


@pytest.mark.parametrize("name", ["PointMass", "HiddenPointMass", "ConflictPointMass", "CartPoleSwingUp"])
def test_shows_the_toy_tasks(tmp_path, capsys, name):
    load_script("train_ppo").main([f"--run_dir={tmp_path / 'run'}", f"--env.name={name}", *SMALL])
    load_script("play").main([str(tmp_path / "run"), "--seconds", "0.5", "--seed", "5"])
    frames = imageio.mimread(tmp_path / "run" / "play.gif")
    assert len(frames) == {"HiddenPointMass": 10, "ConflictPointMass": 5}.get(name, len(frames)) > 0
    colours = {tuple(pixel) for pixel in frames[0][..., :3].reshape(-1, 3)}
    assert frames[0].shape[:2] == (360, 360) and len(colours) >= 3


class Lamp(gymnasium.Env):
    """Renders itself: as bright as its action of the step before."""

    observation_space = action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 0.0, False, self.steps >= 8, {}

    def render(self):
        if self.render_mode != "rgb_array":
            raise RuntimeError("the lamp needs render_mode")
        return np.full((16, 24, 3), 20 * self.steps, np.uint8)


class Dark(Lamp):
    def render(self):
        raise RuntimeError("no bulb")


class Own(PointMass):
    def render(self):
        return np.full((8, 8, 3), int(self._state["steps"][0]), np.uint8)


class Blind(PointMass):
    """Shows nothing."""


@pytest.fixture
def played(tmp_path):
    for cls in (Lamp, Dark):
        gymnasium.register(f"{cls.__name__}-v0", entry_point=cls)
    for cls in (Own, Blind):
        register_env(cls.__name__, cls, override=True)

    def play(name):
        load_script("train_ppo").main([f"--run_dir={tmp_path / 'run'}", f"--env.name={name}", *SMALL])
        load_script("play").main([str(tmp_path / "run"), "--seconds", "0.4"])
        return imageio.mimread(tmp_path / "run" / "play.gif")

    yield play
    for name in ("Lamp-v0", "Dark-v0"):
        del gymnasium.registry[name]
    for name in ("own", "blind"):
        del registry._REGISTRY[name]


def test_what_can_render_itself_is_shown(played):
    frames = played("Lamp-v0")
    assert [int(frame[0, 0, 0]) for frame in frames] == [0, 40, 80, 120]


def test_an_own_environment_that_can_render_is_shown(played):
    assert played("Own")[0].shape[:2] == (8, 8)


def test_what_cannot_be_shown_is_refused(played):
    with pytest.raises(ValueError, match=r"Blind cannot be shown: Blind has no method render\(\)"):
        played("Blind")


def test_a_renderer_that_fails_is_named(played):
    with pytest.raises(ValueError, match=r"Dark-v0 cannot be rendered here: no bulb"):
        played("Dark-v0")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ("{bad", "expected a JSON object"),
        ("[1]", "expected a JSON object"),
        ('{"num_envs": 3, "device": "cpu"}', "device, num_envs cannot be changed here"),
        ('{"seed": 9}', "seed has a flag of its own: --seed 9"),
    ],
)
@pytest.mark.parametrize("script", ["play", "evaluate", "run_policy"])
def test_wrong_arguments_name_flags_that_exist(script, kwargs, message, capsys):
    with pytest.raises(SystemExit):
        load_script(script).main(["somewhere", "--kwargs", kwargs])
    error = capsys.readouterr().err
    assert f"argument --kwargs: {message}" in error and "--env" not in error.replace("[--env ENV]", "")


@pytest.mark.parametrize("script", ["play", "evaluate"])
@pytest.mark.parametrize("kwargs", [{"speed": 3}, {"randomise": False}])
def test_an_argument_that_the_environment_does_not_take_names_no_flag_of_training(run_dir, script, kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))) as refused:
        load_script(script).main([str(run_dir), "--kwargs", json.dumps(kwargs)])
    assert "--env" not in str(refused.value)


def test_refuses_another_kind_of_file(run_dir):
    with pytest.raises(ValueError, match=r"\.gif or \.mp4"):
        load_script("play").main([str(run_dir), "--output", "play.png"])


def test_a_run_resumes_bit_for_bit(run_dir, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train, name = load_script("train_ppo"), "--env.name=Quadruped"
    short = "--env.kwargs.episode_seconds=0.5"  # several episodes end on the way
    train.main([f"--run_dir={whole}", name, short, f"--total_frames={4 * FRAMES}", "--quiet", *TINY])
    train.main([f"--run_dir={parts}", name, short, f"--total_frames={2 * FRAMES}", "--quiet", *TINY])
    train.main([f"--resume={parts}", f"--total_frames={4 * FRAMES}", "--quiet"])
    expected, got = rows(whole), rows(parts)
    assert len(expected) == 4 and got == expected
    assert sum(row["episode/count"] for row in expected) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_the_quadruped_follows_commands_and_stands_still(tmp_path, seed):
    def evaluate(kwargs):
        command = [sys.executable, EXAMPLES / "evaluate.py", tmp_path / "run", "--json", "--seed", "777"]
        command += ["--checkpoint", "latest", "--episodes", "64", "--kwargs", json.dumps(kwargs)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    command = [sys.executable, EXAMPLES / "train_ppo.py", "--env.name", "Quadruped", "--seed", seed, "--quiet"]
    subprocess.run([*command, "--run_dir", tmp_path / "run", "--num_threads", "1"], check=True)
    moving, standing = evaluate({}), evaluate({"zero_commands": 1.0})
    assert moving["velocity_error"] < 0.10 and moving["fallen"] == 0.0
    assert standing["velocity_error"] < 0.03 and standing["fallen"] == 0.0
