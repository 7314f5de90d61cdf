"""edenrl.config: values, messages, files and the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from edenrl.config import AMPConfig, Config, EnvConfig, PPOConfig, RunConfig, load_config, parse_cli, save_config


class TrainPPO(RunConfig):
    """Train PPO."""

    algorithm: PPOConfig = Field(default_factory=PPOConfig)
    """PPO hyper-parameters."""


class TrainCheetah(TrainPPO):
    """Train PPO with defaults of its own."""

    env: EnvConfig = Field(default_factory=lambda: EnvConfig(name="HalfCheetah-v5", num_envs=16))
    """Environment."""
    algorithm: PPOConfig = Field(default_factory=lambda: PPOConfig(lr=3e-4, epochs=10))
    """PPO hyper-parameters."""


def refused(capsys: pytest.CaptureFixture[str], *argv: str, cls: type[RunConfig] = TrainPPO, **kwargs: Any) -> str:
    """Standard error of a command line that must exit with code 2, after checks every message has to pass."""
    with pytest.raises(SystemExit) as exit_info:
        parse_cli(cls, argv, prog="train_ppo.py", **kwargs)
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.out == ""
    assert "Traceback" not in captured.err and "pydantic" not in captured.err.lower()
    assert len(captured.err.splitlines()) <= 24
    return captured.err


# Values -----------------------------------------------------------------------------------------------------------


def test_ppo_defaults_are_the_table_of_the_specification() -> None:
    assert PPOConfig().model_dump() == {
        "name": "PPO",
        "gamma": 0.99,
        "lmbda": 0.95,
        "clip_epsilon": 0.2,
        "entropy_coeff": 0.01,
        "critic_coeff": 1.0,
        "clip_value": True,
        "epochs": 5,
        "num_minibatches": 4,
        "lr": 0.001,
        "lr_schedule": "adaptive",
        "final_lr_fraction": 0.0,
        "desired_kl": 0.01,
        "min_lr": 0.00001,
        "max_lr": 0.01,
        "max_grad_norm": 1.0,
        "steps_per_env": 24,
        "actor_hidden": (256, 128, 64),
        "critic_hidden": (256, 128, 64),
        "activation": "elu",
        "init_std": 1.0,
        "normalize_observations": True,
        "normalize_advantage": "rollout",
        "symmetry": False,
        "action_bound_coeff": 0.0,
        "optimizer": "adam",
        "on_nonfinite": "raise",
        "actor_groups": None,
        "critic_groups": None,
    }


def test_run_defaults() -> None:
    assert RunConfig().model_dump() == {
        "seed": 1,
        "total_frames": 2_000_000,
        "device": "auto",
        "run_dir": None,
        "resume": None,
        "resume_checkpoint": "latest",
        "resume_schedule": "restore",
        "init_from": None,
        "init_checkpoint": "best",
        "export": False,
        "quiet": False,
        "num_threads": None,
        "collector": "single",
        "num_workers": 2,
        "process_timeout": 600.0,
        "env": {
            "name": "PointMass",
            "num_envs": 256,
            "kwargs": {},
            "vectorization": "sync",
            "reward_scale": 1.0,
            "action_mode": "clip",
            "clip_actions": None,
            "random_start": None,
        },
        "evaluation": {
            "num_episodes": 20,
            "seed": 12345,
            "kwargs": {},
            "interval_iterations": None,
            "metric": "return_mean",
            "mode": "max",
        },
        "checkpoint": {"interval_iterations": None, "keep_last": 2},
        "logger": {"kind": "csv", "wandb_mode": "online", "project": "edenrl"},
    }


def test_every_field_has_a_description() -> None:
    def undocumented(cls: type[Config], prefix: str = "") -> list[str]:
        found = []
        for name, field in cls.model_fields.items():
            if not field.description:
                found.append(prefix + name)
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                found += undocumented(field.annotation, f"{prefix}{name}.")
        return found

    assert undocumented(TrainPPO) == []


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("algorithm.gamma", 1.0, [0.0, 1.01, float("nan"), True]),
        ("algorithm.lmbda", 0.0, [-0.1, 1.1]),
        ("algorithm.clip_epsilon", 0.1, [0.0, -0.2]),
        ("algorithm.entropy_coeff", 0.0, [-0.1]),
        ("algorithm.critic_coeff", 0.5, [0.0]),
        ("algorithm.epochs", 1, [0, 1.5, True]),
        ("algorithm.final_lr_fraction", 1.0, [-0.1, 1.1]),
        ("algorithm.desired_kl", 0.02, [0.0]),
        ("algorithm.max_grad_norm", 0.5, [0.0, float("inf")]),
        ("algorithm.steps_per_env", 4, [0]),
        ("algorithm.init_std", 0.1, [0.0]),
        ("algorithm.action_bound_coeff", 10.0, [-1.0]),
        ("algorithm.activation", "silu", ["gelu"]),
        ("algorithm.actor_groups", ("policy",), [()]),
        ("env.num_envs", 4, [0, -4]),
        ("env.reward_scale", 0.1, [0.0]),
        ("env.name", "Quadruped", [""]),
        ("env.action_mode", "none", ["tanh"]),
        ("evaluation.num_episodes", 1, [0]),
        ("evaluation.seed", 0, [-1]),
        ("evaluation.interval_iterations", 1, [0]),
        ("evaluation.mode", "min", ["largest"]),
        ("checkpoint.interval_iterations", 1, [0]),
        ("checkpoint.keep_last", 1, [0]),
        ("logger.kind", "wandb", ["mlflow"]),
        ("total_frames", 1, [0]),
        ("seed", 0, [-1]),
        ("num_threads", 1, [0]),
    ],
)
def test_ranges_name_the_dotted_path(path: str, good: Any, bad: list[Any]) -> None:
    *parents, name = path.split(".")

    def build(value: Any) -> Config:
        values: dict[str, Any] = {name: value}
        for parent in reversed(parents):
            values = {parent: values}
        return TrainPPO.model_validate(values)

    config: Any = build(good)
    for key in path.split("."):
        config = getattr(config, key)
    assert config == good
    for value in bad:
        with pytest.raises(ValidationError) as error:
            build(value)
        assert [".".join(map(str, item["loc"])) for item in error.value.errors()] == [path]


def test_layer_widths_name_the_position() -> None:
    with pytest.raises(ValidationError) as error:
        PPOConfig(actor_hidden=(64, 0))
    assert error.value.errors()[0]["loc"] == ("actor_hidden", 1)


@pytest.mark.parametrize("nested", [False, True])
def test_unknown_field_lists_the_valid_ones_closest_first(nested: bool) -> None:
    with pytest.raises(ValidationError) as error:
        TrainPPO.model_validate({"algorithm": {"gama": 0.9}}) if nested else PPOConfig.model_validate({"gama": 0.9})
    message = error.value.errors()[0]["msg"]
    head = "unknown field 'gama' in PPOConfig; did you mean 'gamma'? Valid fields: gamma, "
    assert message.startswith(head)
    assert sorted(message.partition("Valid fields: ")[2].split(", ")) == sorted(PPOConfig.model_fields)


def test_unknown_field_without_a_close_name_makes_no_suggestion() -> None:
    with pytest.raises(ValidationError, match=r"unknown field 'zzz' in EnvConfig\. Valid fields: ") as error:
        EnvConfig.model_validate({"zzz": 1})
    assert "did you mean" not in str(error.value)


def test_every_unknown_field_is_reported() -> None:
    with pytest.raises(ValidationError) as error:
        EnvConfig.model_validate({"nam": "x", "num_env": 1})
    assert "did you mean 'name'?" in str(error.value) and "did you mean 'num_envs'?" in str(error.value)


def test_assignment_is_checked_and_a_refused_value_is_not_kept() -> None:
    config = TrainPPO()
    with pytest.raises(ValidationError):
        config.algorithm.gamma = 2.0
    with pytest.raises(ValidationError, match="min_lr <= lr <= max_lr"):
        config.algorithm.lr = 1.0
    with pytest.raises(ValidationError, match="do not split"):
        config.algorithm = PPOConfig(num_minibatches=5)
    with pytest.raises(ValueError, match="unknown field 'gama' in PPOConfig; did you mean 'gamma'?"):
        config.algorithm.gama = 0.9
    assert config == TrainPPO()
    config.algorithm.gamma = 0.9
    assert config.algorithm.gamma == 0.9


def test_instances_share_nothing() -> None:
    kwargs = {"goal": [1, 2]}
    first, second = EnvConfig(kwargs=kwargs), EnvConfig(kwargs=kwargs)
    first.kwargs["goal"].append(3)
    assert kwargs == second.kwargs == {"goal": [1, 2]}
    assert TrainPPO().env is not TrainPPO().env and EnvConfig().kwargs is not EnvConfig().kwargs


def test_kwargs_must_be_storable_as_json() -> None:
    assert EnvConfig(kwargs={"size": (1, 2)}).kwargs == {"size": [1, 2]}
    for value in (object(), float("nan")):
        with pytest.raises(ValidationError, match="not storable as JSON"):
            EnvConfig(kwargs={"value": value})


def test_minibatches_must_divide_the_frames_of_an_iteration() -> None:
    # 100 * 24 = 2400 = 7 * 342 + 6: not divisible. 6 divides 2400, and 105 * 24 = 2520 = 7 * 360.
    with pytest.raises(ValidationError) as error:
        TrainPPO(env=EnvConfig(num_envs=100), algorithm=PPOConfig(num_minibatches=7))
    message = error.value.errors()[0]["msg"]
    assert "env.num_envs * algorithm.steps_per_env = 100 * 24 = 2400" in message
    assert "set algorithm.num_minibatches to 6, or env.num_envs to a multiple of 7 such as 105" in message
    TrainPPO(env=EnvConfig(num_envs=100), algorithm=PPOConfig(num_minibatches=6))
    TrainPPO(env=EnvConfig(num_envs=105), algorithm=PPOConfig(num_minibatches=7))


def test_adaptive_schedule_needs_lr_within_its_bounds() -> None:
    with pytest.raises(ValidationError, match="min_lr 1e-05, lr 0.1, max_lr 0.01"):
        PPOConfig(lr=0.1)
    assert PPOConfig(lr=0.1, lr_schedule="constant").lr == 0.1


# Files ------------------------------------------------------------------------------------------------------------


def test_file_round_trip(tmp_path: Path) -> None:
    config = TrainPPO(
        total_frames=1000,
        run_dir="runs/here",
        env=EnvConfig(name="Other", num_envs=8, kwargs={"a": [1, 2.5, None], "b": {"c": "d"}}),
        algorithm=PPOConfig(actor_hidden=(32,), actor_groups=("policy", "scan"), lr=0.1 + 0.2, lr_schedule="constant"),
    )
    path = tmp_path / "new" / "config.json"
    save_config(config, path)
    assert load_config(TrainPPO, path) == config
    assert json.loads(path.read_text())["run_dir"] == "runs/here"
    assert path.read_text().splitlines()[1] == '  "seed": 1,'
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    save_config(EnvConfig(num_envs=3), path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("edenrl._files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_config(EnvConfig(num_envs=4), path)
    assert load_config(EnvConfig, path).num_envs == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_load_errors_name_the_file_and_the_fields(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(FileNotFoundError, match=r"c\.json: no such file"):
        load_config(TrainPPO, path)
    path.write_text("{nope")
    with pytest.raises(ValueError, match=r"c\.json is not readable as JSON"):
        load_config(TrainPPO, path)
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"c\.json must hold one JSON object of fields, got list"):
        load_config(TrainPPO, path)
    path.write_text('{"algorithm": {"gamma": 2}, "env": {"num_envs": 0}}')
    with pytest.raises(ValueError, match=r"c\.json is not a valid TrainPPO") as error:
        load_config(TrainPPO, path)
    assert str(error.value).splitlines()[1:] == [
        "  env.num_envs = 0: Input should be greater than or equal to 1",
        "  algorithm.gamma = 2: Input should be less than or equal to 1",
    ]


# Command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "path", "expected"),
    [
        (["--algorithm.gamma", "0.98"], "algorithm.gamma", 0.98),
        (["--algorithm.gamma=0.98"], "algorithm.gamma", 0.98),
        (["--algorithm.gamma", "0.9", "--algorithm.gamma", "0.8"], "algorithm.gamma", 0.8),
        (["--env.name", "HalfCheetah-v5"], "env.name", "HalfCheetah-v5"),
        (["--env.name", "123"], "env.name", "123"),
        (["--env.kwargs", '{"success_bonus": 30}'], "env.kwargs", {"success_bonus": 30}),
        (["--env.kwargs.success_bonus", "30"], "env.kwargs", {"success_bonus": 30}),
        (["--env.kwargs.bonus", "-1e-3"], "env.kwargs", {"bonus": -0.001}),
        (["--env.kwargs.terrain.kind", "rough"], "env.kwargs", {"terrain": {"kind": "rough"}}),
        (["--env.kwargs.flag=False", "--env.kwargs.path", "a=b"], "env.kwargs", {"flag": False, "path": "a=b"}),
        (["--env.kwargs", '{"a": 1, "b": 2}', "--env.kwargs.b", "3"], "env.kwargs", {"a": 1, "b": 3}),
        (["--env.kwargs", '{"a": 1}', "--env.kwargs", '{"b": 2}'], "env.kwargs", {"b": 2}),
        (["--algorithm.actor_hidden", "64,32"], "algorithm.actor_hidden", (64, 32)),
        (["--algorithm.actor_hidden", "[64,32]"], "algorithm.actor_hidden", (64, 32)),
        (["--algorithm.actor_hidden", "64"], "algorithm.actor_hidden", (64,)),
        (["--algorithm.actor_hidden", "64", "--algorithm.actor_hidden", "32,16"], "algorithm.actor_hidden", (32, 16)),
        (["--algorithm.actor_groups", "policy", "--algorithm.actor_groups", "None"], "algorithm.actor_groups", None),
        (["--algorithm.actor_groups", "policy,scan"], "algorithm.actor_groups", ("policy", "scan")),
        (["--quiet"], "quiet", True),
        (["--quiet", "--seed", "2"], "quiet", True),
        (["--quiet", "false"], "quiet", False),
        (["--algorithm.clip_value", "false"], "algorithm.clip_value", False),
        (["--total_frames", "1e6"], "total_frames", 1_000_000),
        (["--total_frames", "1_000_000"], "total_frames", 1_000_000),
        (["--seed", "9007199254740993"], "seed", 2**53 + 1),
        (["--run_dir", "None"], "run_dir", None),
        (["--checkpoint.interval_iterations", "50"], "checkpoint.interval_iterations", 50),
        (["--algorithm.lr_schedule", "warmup_cosine"], "algorithm.lr_schedule", "warmup_cosine"),
    ],
)
def test_flags(argv: list[str], path: str, expected: Any) -> None:
    config: Any = parse_cli(TrainPPO, argv)
    value = config
    for key in path.split("."):
        value = getattr(value, key)
    assert value == expected and type(value) is type(expected)
    # Nothing else moved: putting the default back gives the default configuration.
    *parents, name = path.split(".")
    owner, fresh = config, TrainPPO()
    default: Any = fresh
    for key in parents:
        owner, default = getattr(owner, key), getattr(default, key)
    setattr(owner, name, getattr(default, name))
    config.seed = 1
    assert config == fresh


def test_argv_defaults_to_the_process_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", "--seed", "7"])
    assert parse_cli(TrainPPO).seed == 7


def test_environment_variables_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "99")
    assert parse_cli(TrainPPO, []).seed == 1


def test_defaults_of_a_script_survive_a_flag_of_the_same_group() -> None:
    config = parse_cli(TrainCheetah, ["--env.reward_scale", "0.5", "--algorithm.gamma", "0.9"])
    assert (config.env.name, config.env.num_envs, config.env.reward_scale) == ("HalfCheetah-v5", 16, 0.5)
    assert (config.algorithm.lr, config.algorithm.epochs, config.algorithm.gamma) == (3e-4, 10, 0.9)


def test_fields_without_default_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    class Needs(RunConfig):
        """Needs a task."""

        task: str
        """Task."""

    assert parse_cli(Needs, ["--task", "walk"]).task == "walk"
    assert "task: Field required" in refused(capsys, cls=Needs)


PRESETS: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {
        "total_frames": 3_000_000,
        "env": {"num_envs": 16, "reward_scale": 0.1, "kwargs": {"a": 1}},
        "algorithm": {"gamma": 0.98},
    },
    "PointMass": {"seed": 5},
}


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "halfcheetah-V5", "gym:HalfCheetah-v5"])
def test_preset_sits_between_defaults_and_command_line(name: str) -> None:
    config = parse_cli(TrainPPO, ["--env.name", name, "--env.num_envs", "32"], presets=PRESETS)
    assert config.env.name == name
    assert (config.total_frames, config.env.num_envs, config.env.reward_scale) == (3_000_000, 32, 0.1)
    assert (config.algorithm.gamma, config.algorithm.lmbda, config.seed) == (0.98, 0.95, 1)


def test_preset_key_may_carry_the_gym_prefix() -> None:
    assert parse_cli(TrainPPO, ["--env.name", "Ant-v5"], presets={"gym:ant-v5": {"seed": 3}}).seed == 3


def test_preset_of_the_class_default_environment() -> None:
    assert parse_cli(TrainPPO, [], presets=PRESETS).seed == 5
    assert parse_cli(TrainCheetah, [], presets=PRESETS).total_frames == 3_000_000


def test_kwargs_are_replaced_as_a_whole_and_edited_by_key() -> None:
    argv = ["--env.name", "HalfCheetah-v5"]
    assert parse_cli(TrainPPO, [*argv, "--env.kwargs", '{"b": 2}'], presets=PRESETS).env.kwargs == {"b": 2}
    assert parse_cli(TrainPPO, [*argv, "--env.kwargs.b", "2"], presets=PRESETS).env.kwargs == {"a": 1, "b": 2}
    assert PRESETS["HalfCheetah-v5"]["env"]["kwargs"] == {"a": 1}


def test_wrong_preset_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, presets={"PointMass": {"algorithm": {"gama": 0.9}}})
    assert "algorithm: unknown field 'gama' in PPOConfig; did you mean 'gamma'?" in error


def test_config_file_is_the_base_and_switches_presets_off(tmp_path: Path) -> None:
    path = tmp_path / "partial.json"
    path.write_text(
        '{"env": {"name": "HalfCheetah-v5", "kwargs": {"b": 2}}, "algorithm": {"gamma": 0.9, "lmbda": 0.9}}'
    )
    config = parse_cli(TrainPPO, ["--config", str(path), "--algorithm.gamma", "0.8"], presets=PRESETS)
    assert (config.env.name, config.env.num_envs, config.env.kwargs) == ("HalfCheetah-v5", 256, {"b": 2})
    assert (config.total_frames, config.algorithm.gamma, config.algorithm.lmbda) == (2_000_000, 0.8, 0.9)


def test_resume_starts_from_the_run_and_takes_overrides(tmp_path: Path) -> None:
    run = str(tmp_path)
    save_config(TrainPPO(seed=4, run_dir="elsewhere", algorithm=PPOConfig(gamma=0.9)), tmp_path / "config.json")
    config = parse_cli(TrainPPO, ["--resume", run, "--total_frames", "5e6"], presets=PRESETS)
    assert (config.resume, config.run_dir, config.seed, config.total_frames) == (run, run, 4, 5_000_000)
    assert config.algorithm.gamma == 0.9


def test_resuming_into_another_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_config(TrainPPO(), tmp_path / "config.json")
    error = refused(capsys, "--resume", str(tmp_path), "--run_dir", str(tmp_path / "other"))
    assert "resume and run_dir name two directories" in error and f"--config {tmp_path}/config.json" in error
    assert parse_cli(TrainPPO, ["--resume", str(tmp_path), "--run_dir", f"{tmp_path}/"]).run_dir == str(tmp_path)


def test_what_a_resumed_run_may_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kwargs = {"bonus": 1, "terrain": {"kind": "flat"}}
    save_config(TrainPPO(env=EnvConfig(kwargs=kwargs)), tmp_path / "config.json")
    resume = ("--resume", str(tmp_path))
    error = refused(capsys, *resume, "--seed=2", "--env.kwargs.terrain.kind=rough", "--env.kwargs.goal=3")
    assert (
        "cannot change seed (was 1, now 2), env.kwargs.terrain.kind (was 'flat', now 'rough'), "
        "env.kwargs.goal (was None, now 3)" in error
    )
    free = ("--total_frames=9", "--device=cpu", "--quiet", "--logger.kind=wandb", "--checkpoint.keep_last=7")
    assert parse_cli(TrainPPO, [*resume, *free]).checkpoint.keep_last == 7
    restart = ("--resume_schedule=restart", "--algorithm.lr=2e-3", "--algorithm.desired_kl=0.1")
    assert parse_cli(TrainPPO, [*resume, *restart]).algorithm.lr == 2e-3
    assert "cannot change algorithm.gamma" in refused(capsys, *resume, *restart, "--algorithm.gamma=0.5")


def test_a_field_that_an_older_file_lacks_has_its_default_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"seed": 3}')
    assert parse_cli(TrainPPO, ["--resume", str(tmp_path)]).seed == 3


def test_a_path_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_config(TrainPPO(seed=3), tmp_path / "config.json")
    assert parse_cli(TrainPPO, ["--run_dir=~/run"]).run_dir == str(tmp_path / "run")
    assert parse_cli(TrainPPO, ["--config=~/config.json"]).seed == 3
    assert parse_cli(TrainPPO, ["--resume=~"]).resume == str(tmp_path)


def test_config_of_a_resumed_run_starts_a_new_run(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    save_config(TrainPPO(seed=4, resume="runs/old", run_dir="runs/old"), path)
    config = parse_cli(TrainPPO, ["--config", str(path)])
    assert (config.seed, config.resume, config.run_dir) == (4, None, None)
    save_config(TrainPPO(run_dir="runs/mine"), path)
    assert parse_cli(TrainPPO, ["--config", str(path)]).run_dir == "runs/mine"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--algorithm.gama", "0.9"], "unknown flag --algorithm.gama; closest: --algorithm.gamma, "),
        (["--gamma", "0.9"], "unknown flag --gamma; closest: --algorithm.gamma"),
        (["--totl_frames=5"], "unknown flag --totl_frames; closest: --total_frames"),
        (["--confg", "x"], "unknown flag --confg; closest: --config"),
        (["--algorithm.gam", "0.9"], "unknown flag --algorithm.gam; closest: --algorithm.gamma"),
        (["--totl-frames", "5"], "unknown flag --totl-frames; closest: --total_frames"),
        (["--frame", "5"], "unknown flag --frame; closest: --frames"),
        (["--num-env=5"], "unknown flag --num-env; closest: --num_envs"),
        (["--qqqqqqqq"], "unknown flag --qqqqqqqq; --help all lists every flag"),
        (["stray"], "unexpected argument 'stray'; every value follows its flag"),
        (["--algorithm.gamma", "2"], "algorithm.gamma = '2': Input should be less than or equal to 1"),
        (["--algorithm.gamma"], "argument --algorithm.gamma: expected one argument"),
        (["--seed", "-1"], "seed = '-1': expected a whole number from 0 to 2**62 - 1"),
        (
            ["--seed", "99999999999999999999999"],
            "expected a whole number from 0 to 2**62 - 1",
        ),
        (
            ["--evaluation.seed", "1e30"],
            "evaluation.seed = '1e30': expected a whole number from 0 to 2**62 - 1",
        ),
        (["--seed", "1.5"], "seed = 1.5: Input should be a valid integer"),
        (["--env.num_envs", "many"], "env.num_envs = 'many': Input should be a valid integer"),
        (["--total_frames", "1.5"], "total_frames = 1.5: Input should be a valid integer"),
        (["--total_frames", "1e400"], "total_frames = inf: Input should be a finite number"),
        (["--quiet", "maybe"], "quiet = 'maybe': Input should be a valid boolean"),
        (["--algorithm.optimizer", "lion"], "'adam', 'adamw', 'sgd' or 'rmsprop'"),
        (["--algorithm.actor_hidden", "64,x"], "algorithm.actor_hidden.1 = 'x': Input should be a valid integer"),
        (["--algorithm.actor_hidden", "[64,"], "algorithm.actor_hidden = '[64,': Input should be a valid tuple"),
        (["--env.kwargs", "{bad"], "--env.kwargs expects a JSON object such as '{\"key\": 1}', got '{bad'"),
        (["--env.kwargs", "3"], "--env.kwargs.KEY VALUE sets a single entry"),
        (["--env.num_envs", "7", "--algorithm.num_minibatches", "5"], "7 * 24 = 168 frames do not split"),
        (["--config", "absent.json"], "absent.json: no such file"),
        (["--resume", "absent"], "--resume absent: no such directory"),
        (["--config", "a", "--resume", "b"], "give --config or --resume, not both"),
        (["--run_dir", "~nobody-here/x"], "give the path in full"),
    ],
)
def test_wrong_command_lines(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    assert expected in refused(capsys, *argv)


def test_wrong_files_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{tmp_path / 'config.json'}: no such file" in refused(capsys, "--resume", str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text("{nope")
    assert "config.json is not readable as JSON" in refused(capsys, "--config", str(path))
    assert "config.json is not readable as JSON" in refused(capsys, "--resume", str(tmp_path))
    path.write_text('{"env": {"nam": "x"}, "seed": -1}')
    error = refused(capsys, "--config", str(path))
    assert "env: unknown field 'nam' in EnvConfig; did you mean 'name'?" in error
    assert "seed = -1: expected a whole number from 0 to" in error
    assert "is a directory; give a file" in refused(capsys, "--config", str(tmp_path))
    assert "--resume is empty" in refused(capsys, "--resume", "")


def test_all_unknown_fields_of_a_file_are_reported_at_once_with_the_nearest_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    values = {"sed": 1, "totl_frames": 5, "env": {"nam": "x", "num_env": 3}, "algorithm": {"gama": 1, "clip": {"a": 1}}}
    path.write_text(json.dumps({**values, "total_frames": -5}))
    error = refused(capsys, "--config", str(path))
    for text in (
        "unknown field 'sed' in TrainPPO; did you mean 'seed'?",
        "unknown field 'totl_frames' in TrainPPO; did you mean 'total_frames'?",
        "env: unknown field 'nam' in EnvConfig; did you mean 'name'?",
        "env: unknown field 'num_env' in EnvConfig; did you mean 'num_envs'?",
        "algorithm: unknown field 'gama' in PPOConfig; did you mean 'gamma'?",
        "algorithm: unknown field 'clip' in PPOConfig",
        "total_frames = -5: Input should be greater than or equal to 1",
    ):
        assert text in error
    with pytest.raises(ValueError, match=r"(?s)'sed' in TrainPPO.*") as caught:
        load_config(TrainPPO, path)
    assert all(name in str(caught.value) for name in ("'totl_frames'", "'num_env'", "'gama'"))


@pytest.mark.parametrize("flag", ["--resume", "--config"])
def test_a_run_of_another_script_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    class Other(RunConfig):
        algorithm: AMPConfig = Field(default_factory=AMPConfig)

    path = tmp_path / "config.json"
    save_config(Other(), path)
    message = refused(capsys, flag, str(tmp_path if flag == "--resume" else path))
    expected = f"{tmp_path} is a run of AMP, this script trains PPO; resume it with examples/train_amp.py"
    assert (expected if flag == "--resume" else "start from it with examples/train_amp.py") in message
    assert "Valid fields" not in message


def test_every_mistake_is_reported_at_once_but_on_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "--algorithm.gamma", "2", "--env.num_envs", "0")
    assert "algorithm.gamma" in error and "env.num_envs" in error
    widths = ",".join(["0"] * 30)
    error = refused(capsys, "--algorithm.actor_hidden", widths)
    assert "algorithm.actor_hidden.9 = '0'" in error and "... and 20 more" in error


def test_help_shows_every_flag_description_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_info:
        parse_cli(TrainCheetah, ["--help", "all"], prog="train_ppo.py")
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: train_ppo.py [--config FILE | --resume RUN_DIR] [--FIELD VALUE ...]")
    groups: list[tuple[str, type[Config]]] = [("", RunConfig), ("env.", EnvConfig), ("algorithm.", PPOConfig)]
    for group, cls in groups:
        for name, field in cls.model_fields.items():
            if not (isinstance(field.annotation, type) and issubclass(field.annotation, Config)):
                assert f"--{group}{name} " in text
                assert f"{field.description} (default: " in text
    for title in ("env", "algorithm", "evaluation", "checkpoint", "logger"):
        assert f"{title} options:" in text
    # The script's own defaults, not those of the class they override.
    assert "Environments stepped together. (default: 16)" in text
    assert "Learning rate at the start. (default: 0.0003)" in text
    assert "JSON string" not in text and "factory" not in text


@pytest.mark.parametrize(
    "argv", [["--env.name", "halfcheetah-V5", "--help", "all"], ["-h", "all", "--env=HalfCheetah-v5"]]
)
def test_help_shows_the_preset_of_the_environment_and_marks_it(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_info:
        parse_cli(TrainPPO, argv, presets=PRESETS)
    assert exit_info.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Defaults marked [preset] are those of the preset for half" in text.replace("HalfC", "halfc")
    assert "Environments stepped together. [preset] (default: 16)" in text
    assert "[preset] (default: 3000000)" in text and "[preset] (default: {'a': 1})" in text
    assert "Seed of networks, environments and sampling. (default: 1)" in text
    assert text.count("[preset] (default: ") == 5


def test_help_without_a_preset_or_with_a_file_shows_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--env.name=Ant-v5"], ["--env.name=HalfCheetah-v5", "--config=x.json"]):
        for asked in (["--help"], ["--help", "all"]):
            with pytest.raises(SystemExit):
                parse_cli(TrainPPO, [*argv, *asked], presets=PRESETS)
            assert "[preset]" not in capsys.readouterr().out


def test_help_does_not_import_torch() -> None:
    script = "import sys; import edenrl.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("seed", [2**62, 2**64, -1, 10**30])
def test_a_seed_that_no_generator_takes_is_refused(seed: int) -> None:
    with pytest.raises(ValidationError, match="seed"):
        RunConfig(seed=seed)


def test_the_last_iteration_may_be_a_part_and_processes_share_the_frames() -> None:
    cfg = TrainPPO(
        total_frames=1001, env=EnvConfig(num_envs=4), algorithm=PPOConfig(steps_per_env=25, num_minibatches=2)
    )
    assert cfg.frames_per_rollout == 100
    assert [cfg.num_iterations(processes) for processes in (1, 2, 3)] == [11, 6, 4]


@pytest.mark.parametrize(
    "argv",
    [
        ["--total_frames", "96000", "--run_dir", "x", "--env.num_envs", "8", "--env.action_mode", "squash"],
        ["--total-frames", "96000", "--run-dir", "x", "--env.num-envs", "8", "--env.action-mode", "squash"],
        ["--total-frames=96000", "--run_dir=x", "--env.num-envs=8", "--env.action_mode=squash"],
        ["--frames", "96_000", "--run-dir", "x", "--num-envs", "8", "--env.action-mode", "squash"],
        ["--frames=96e3", "--run_dir", "x", "--num_envs=8", "--env.action_mode", "squash"],
    ],
)
def test_dashes_underscores_and_short_names_are_the_same(argv: list[str]) -> None:
    config = parse_cli(TrainPPO, argv)
    assert (config.total_frames, config.run_dir) == (96_000, "x")
    assert (config.env.num_envs, config.env.action_mode) == (8, "squash")


@pytest.mark.parametrize("flag", ["--lr", "--algorithm.lr"])
@pytest.mark.parametrize("name", ["--env", "--env.name"])
def test_short_names_choose_the_preset_and_override_it(flag: str, name: str) -> None:
    config: Any = parse_cli(TrainPPO, [name, "halfcheetah-v5", flag, "2e-3"], presets=PRESETS)
    assert (config.env.name, config.env.num_envs, config.algorithm.lr) == ("halfcheetah-v5", 16, 2e-3)


def test_both_spellings_of_flags_with_and_without_value_of_tuples_and_of_dictionary_entries() -> None:
    argv = ["--algorithm.actor-hidden", "8,4", "--algorithm.clip-value", "--env.kwargs.max-steps", "5"]
    config: Any = parse_cli(TrainPPO, [*argv, "--env.kwargs.a.keep-this", "1", "--num-threads=None"])
    assert config.algorithm.actor_hidden == (8, 4) and config.algorithm.clip_value is True
    assert config.env.kwargs == {"max_steps": 5, "a": {"keep-this": 1}} and config.num_threads is None


def test_a_field_of_its_own_keeps_its_name_where_others_have_a_short_one(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(RunConfig):
        """A field that is called like a short name, and no algorithm."""

        frames: int = 3
        """Frames of a stack."""

    config = parse_cli(Own, ["--frames", "4"])
    assert (config.frames, config.total_frames) == (4, RunConfig().total_frames)
    assert "unknown flag --lr" in refused(capsys, "--lr", "1e-3", cls=Own)


def help_of(capsys: pytest.CaptureFixture[str], cls: type[RunConfig], *argv: str, **kwargs: Any) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_cli(cls, argv, prog="train_ppo.py", **kwargs)
    assert exit_info.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--seed", "3", "-h"], ["--help", "--env=HalfCheetah-v5"]])
def test_help_fits_a_screen(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(capsys, TrainPPO, *argv, presets=PRESETS)
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    # Before Python 3.13, argparse repeats the value after every name of a flag.
    for flags in (
        r"--env\.name( NAME)?, --env NAME",
        "--total_frames( N)?, --frames N",
        r"--algorithm\.lr( RATE)?, --lr RATE",
    ):
        assert re.search(flags, words)
    assert "--help all" in words and "edenrl/config/presets.py" in words and "HalfCheetah-v5" in words
    assert "evaluation.metric" not in words


def test_help_takes_nothing_but_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help shows the common flags, --help all every one" in refused(capsys, "--help", "everything")
