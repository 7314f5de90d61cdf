"""What is said of a run that does not fit: the observation group that grew, or the library that the file is from."""

import functools
import json

import pytest
import torch
from torch import nn
from torchrl.checkpoint import CheckpointError

from edenrl.config import RunConfig
from edenrl.envs import HiddenPointMass, PointMass, register_env, registry
from edenrl.modules import gaussian_actor, make_actor, observation_groups
from edenrl.training import Run, build_env, export_run, load_policy_weights, load_weights, require_run
from edenrl.training.observations import changed_observations, describe_observations, save_observations


class Grown(PointMass):
    """Senses a contact, ``contacts`` numbers wide, and without ``terms`` does not say so."""

    def __init__(self, num_envs, *, device=None, seed=None, contacts=0, terms=True):
        self.contacts, self.terms = contacts, terms
        super().__init__(num_envs, device=device, seed=seed)

    def _make_specs(self):
        self._set_specs(2, observation=14 + self.contacts, metrics=("success",))

    def _observe(self):
        out = super()._observe()
        out["metrics"] = out["metrics"].select("success")
        out["observation"] = torch.cat([out["observation"], torch.zeros(self.num_envs, self.contacts)], -1)
        return out

    def policy_contract(self):
        contract = super().policy_contract()
        if not self.terms:
            return {"rate": contract["rate"]}
        if self.contacts:
            contract["observations"]["observation"].append({"name": "foot contact", "width": self.contacts})
        return contract


@pytest.fixture(autouse=True)
def _grown(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register_env("Grown", Grown)


def config(folder, **kwargs):
    env = {"name": "Grown", "num_envs": 2, "kwargs": kwargs}
    return RunConfig(run_dir=str(folder), env=env, quiet=True, evaluation={"num_episodes": 2})


def grow(**kwargs):
    """Changes the environment in its own code, not by arguments of the run."""
    register_env("Grown", functools.partial(Grown, **kwargs), override=True)


def score():
    return {"return_mean": 1.0}


def trained(folder, resume=False, **kwargs):
    grow(**kwargs)
    cfg = config(folder)
    if resume:
        cfg = cfg.model_copy(update={"resume": str(folder)})
    with Run(cfg, "Some", iterations=2 if resume else 1, frames_per_iteration=1, evaluate=score) as run:
        env = run.env()
        policy = make_actor(observation_groups(env.observation_spec), env.action_spec_unbatched, hidden=(4,))
        run.keep(policy=policy)
        for _ in run:
            pass
    return policy


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"contacts": 4}, r"has 18 features instead of 14 \(the term 'foot contact' \(4\) is new\)"),
        ({"contacts": 3}, {}, r"has 14 features instead of 17 \(the term 'foot contact' \(3\) is gone\)"),
        ({"contacts": 1}, {"contacts": 6}, r"20 features instead of 15 \(the term 'foot contact' has 6 instead of 1\)"),
        ({"terms": False}, {"contacts": 2, "terms": False}, r"has 16 features instead of 14\."),
    ],
)
def test_the_group_and_the_term_that_changed_are_named(tmp_path, before, after, expected):
    trained(tmp_path / "run", **before)
    grow(**after)
    env = Grown(2, **after)
    policy = gaussian_actor(observation_groups(env.observation_spec), 2, hidden=(4,))
    message = rf"policy\..* is shape .*The environment has changed since the run: the group 'observation' .*{expected}"
    with pytest.raises(CheckpointError, match=message):
        load_policy_weights(policy, tmp_path / "run", "latest", env=env)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("checkpoint-*")
    with pytest.raises(CheckpointError, match=message):
        load_weights({"policy": policy}, tmp_path, str(checkpoint), env=env)
    with pytest.raises(CheckpointError, match=message):
        export_run(config(tmp_path, **after), policy, tmp_path / "run", checkpoint="latest", formats=["jit"])
    with pytest.raises(CheckpointError, match=message):
        trained(tmp_path / "run", resume=True, **after)
    # What was saved is that of the run, not of the failed attempt.
    assert json.loads((tmp_path / "run" / "observations.json").read_text()) == describe_observations(Grown(2, **before))


def test_a_network_of_another_shape_alone_blames_no_group(tmp_path):
    trained(tmp_path / "run")
    policy = gaussian_actor({"observation": 14}, 2, hidden=(5,))
    with pytest.raises(CheckpointError) as refused:
        load_policy_weights(policy, tmp_path / "run", "latest", env=Grown(2))
    assert "has changed" not in str(refused.value)


def test_a_run_without_the_description_names_the_tensor_as_before(tmp_path):
    trained(tmp_path / "run")
    (tmp_path / "run" / "observations.json").unlink()
    env = Grown(2, contacts=3)
    with pytest.raises(CheckpointError, match=r"norm.mean is shape .*Nothing was loaded") as refused:
        load_policy_weights(gaussian_actor({"observation": 17}, 2, hidden=(4,)), tmp_path / "run", "latest", env=env)
    assert "has changed" not in str(refused.value)


def test_frames_and_groups_are_named(tmp_path):
    saved = describe_observations(HiddenPointMass(2))
    assert saved["prop_history"]["frames"] == 10 and saved["prop_history"]["width"] == 80
    save_observations(tmp_path, saved)
    now = json.loads(json.dumps(saved))
    now["prop_history"] |= {"frames": 20, "width": 160}
    now["scan"] = {"width": 7, "frames": 1, "terms": {}}
    del now["critic"]
    text = changed_observations(tmp_path, now)
    assert "'prop_history' has 160 features instead of 80 (it stacks 20 frames instead of 10)" in text
    assert "the group 'critic' (16) is gone" in text and "the group 'scan' (7) is new" in text
    assert changed_observations(tmp_path, saved) == ""


def test_a_declaration_that_is_wrong_stops_no_training(tmp_path):
    env = Grown(2)
    env.policy_contract = lambda: {"observation": {}}
    assert describe_observations(env) == {"observation": {"width": 14, "frames": 1, "terms": {}}}


@pytest.mark.parametrize("key", ["model_state_dict", "actor_state_dict"])
@pytest.mark.parametrize("in_folder", [False, True])
def test_a_file_of_rsl_rl_is_recognized(tmp_path, key, in_folder):
    from edenrl.config import parse_cli

    file = tmp_path / "logs" / "model_1500.pt"
    file.parent.mkdir()
    torch.save({key: nn.Linear(3, 2).state_dict(), "iter": 1500, "infos": None}, file)
    given = file.parent if in_folder else file
    expected = rf"model_1500\.pt is a file of rsl_rl \(a torch file with '{key}'\).*VecEnvAdapter.*make_actor"
    policy = gaussian_actor({"observation": 14}, 2, hidden=(4,))
    with pytest.raises(FileNotFoundError, match=expected):
        require_run(given)
    with pytest.raises(FileNotFoundError, match=expected):
        load_policy_weights(policy, given)
    trained(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=expected):
        load_policy_weights(policy, tmp_path / "run", str(given))
    with pytest.raises(SystemExit):
        parse_cli(RunConfig, ["--resume", str(given)])


def test_the_resumed_file_of_rsl_rl_is_named_on_the_command_line(tmp_path, capsys):
    from edenrl.config import parse_cli

    torch.save({"model_state_dict": {}}, tmp_path / "model_0.pt")
    with pytest.raises(SystemExit):
        parse_cli(RunConfig, ["--resume", str(tmp_path / "model_0.pt")])
    assert "is a file of rsl_rl" in capsys.readouterr().err


def test_other_files_are_not_taken_for_one_of_rsl_rl(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "model_1.pt")
    (tmp_path / "model_2.pt").write_text("model_state_dict")
    for given in (tmp_path / "model_1.pt", tmp_path / "model_2.pt"):
        with pytest.raises(FileNotFoundError, match="no such directory"):
            require_run(given)
    with pytest.raises(FileNotFoundError, match="is not a run directory"):
        require_run(tmp_path)
    # A run beside which somebody keeps such a file stays a run.
    trained(tmp_path / "run")
    torch.save({"model_state_dict": {}}, tmp_path / "run" / "model_3.pt")
    require_run(tmp_path / "run")
    assert build_env(config(tmp_path / "run")).observation_spec["observation"].shape == (2, 14)
