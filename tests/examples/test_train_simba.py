"""The SimBa script: resumption, group widths on the command line, refusals and evaluation."""

import json

import pytest
from trainer_cases import TRAINERS, refusals

from edenrl.config import parse_cli
from edenrl.envs import PointMass, register_env
from edenrl.modules import HyperDense

SIMBA = TRAINERS["SimBa"]
train, policy_of, train_simba, TINY = SIMBA.train, SIMBA.policy, SIMBA.module, SIMBA.flags


class TwoGroups(PointMass):
    """PointMass with its observation split into "policy" (4) and "scan" (10)."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        whole = self.observation_spec.pop("observation")
        self.observation_spec["policy"], self.observation_spec["scan"] = whole[..., :4], whole[..., 4:]

    def _split(self, out):
        whole = out.pop("observation")
        return out.set("policy", whole[..., :4].clone()).set("scan", whole[..., 4:].clone())

    def _step(self, tensordict):
        return self._split(super()._step(tensordict))

    def _reset(self, tensordict):
        return self._split(super()._reset(tensordict))


@pytest.fixture(autouse=True)
def two_groups():
    register_env("TwoGroups", lambda n, **kw: TwoGroups(n, **kw), override=True)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
@pytest.mark.parametrize("schedule", ["adaptive", "linear"])
def test_resumed_run_is_the_uninterrupted_run_and_stays_on_the_sphere(tmp_path, optimizer, schedule):
    flags = (f"--algorithm.optimizer={optimizer}", f"--algorithm.lr_schedule={schedule}", "--env.name=TwoGroups")
    whole = SIMBA.whole_like_parts(tmp_path, 12, 5, *flags, dies=True)
    layers = [m for m in SIMBA.policy(whole).modules() if isinstance(m, HyperDense)]
    assert layers and all((layer.weight.norm(dim=1) - 1).abs().max() < 1e-6 for layer in layers)


def test_widths_of_every_group_are_set_on_the_command_line(tmp_path):
    flags = ["--algorithm.group_hidden.scan", "16,8", "--algorithm.encoder_hidden", "4", "--algorithm.latent_dim", "6"]
    train(tmp_path / "run", 1, "--env.name=TwoGroups", *flags)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["algorithm"]["group_hidden"] == {"scan": [16, 8]}
    encoders = policy_of(tmp_path / "run").module[0].module.encoder.encoders
    shapes = {name: [tuple(w.shape) for w in mlp.parameters() if w.ndim == 2] for name, mlp in encoders.items()}
    assert shapes == {"policy": [(4, 4), (6, 4)], "scan": [(16, 10), (8, 16), (6, 8)]}


@pytest.mark.parametrize(("typed", "widths"), [("512,256", (512, 256)), ("[64]", (64,)), ("64", (64,)), ("[]", ())])
def test_group_widths_are_read_as_typed(typed, widths):
    cfg = parse_cli(train_simba.Train, ["--algorithm.group_hidden.scan", typed])
    assert cfg.algorithm.group_hidden == {"scan": widths}
    whole = parse_cli(train_simba.Train, ["--algorithm.group_hidden", json.dumps({"scan": widths})])
    assert whole.algorithm == cfg.algorithm


@refusals(
    """
    --algorithm.actor_groups=scam -> Groups of this environment: {'policy': 4, 'scan': 10}
    --algorithm.group_hidden.scam=8 -> names ['scam']. Groups of this environment: {'policy': 4, 'scan': 10}
    --algorithm.group_hidden.scan=8,x -> algorithm.group_hidden.scan.1 = 'x'
    --algorithm.group_hidden.scan=8 --algorithm.encoder_hidden=None -> leave one of them out
    --algorithm.actor_hidden=8 -> unknown flag --algorithm.actor_hidden
    --algorithm.optimizer=lion -> algorithm.optimizer = 'lion'
    """
)
def test_mistakes_name_the_fix(refuses, flags, expected):
    refuses(SIMBA, [*TINY, "--env.name=TwoGroups", *flags], expected)


def test_critic_and_actor_may_read_different_groups(tmp_path):
    flags = ["--algorithm.actor_groups=policy", "--algorithm.group_hidden.scan=8"]
    train(tmp_path / "run", 1, "--env.name=TwoGroups", *flags)
    assert list(policy_of(tmp_path / "run").module[0].module.encoder.encoders) == ["policy"]
