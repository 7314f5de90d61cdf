"""The RMA script: resumption at every phase, what is evaluated and exported, and mistakes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from trainer_cases import EXAMPLES, Script, load_script, refusals, rows

from edenrl.collectors import make_collector
from edenrl.config import RMAConfig, load_config
from edenrl.envs import HiddenPointMass, register_env
from edenrl.export import PolicySpec
from edenrl.modules import SignedPermutation, rma_composition, rma_policy
from edenrl.training import build_env, collector_options, evaluate_run, load_policy_weights

TINY = [
    "--env.num_envs=8",
    "--algorithm.steps_per_env=8",
    "--algorithm.actor_hidden=8",
    "--algorithm.critic_hidden=8",
    "--algorithm.priv_hidden=6,3",
    "--algorithm.estimator_hidden=8",
    "--algorithm.epochs=2",
    "--algorithm.num_minibatches=2",
    "--algorithm.dagger_update_freq=3",
    "--algorithm.priv_reg_begin=2",
    "--algorithm.priv_reg_length=6",
    "--algorithm.priv_reg_end=0.1",
    "--evaluation.num_episodes=4",
    "--evaluation.interval_iterations=1000",
    "--checkpoint.interval_iterations=1",
    "--checkpoint.keep_last=20",
    "--num_threads=1",
]
RMA = Script("train_rma", TINY, 64)
train, train_rma, FRAMES = RMA.train, RMA.module, RMA.frames


def policy_of(run_dir, checkpoint="latest"):
    cfg = load_config(train_rma.Train, Path(run_dir) / "config.json")
    policy = train_rma.make_policy(cfg, build_env(cfg, num_envs=1))
    load_policy_weights(policy, run_dir, checkpoint)
    return cfg, policy


class Flat(HiddenPointMass):
    """HiddenPointMass with all parts in one group, and their mirror image along x."""

    mirrors = {
        "policy": SignedPermutation(range(96), [-1, 1] * 5 + [1] * 3 + [-1, 1] + [1] + [-1, 1] * 40),
        "action": SignedPermutation(range(2), [-1, 1]),
    }

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        for name in ("prop", "priv_explicit", "priv_latent", "prop_history", "critic"):
            del self.observation_spec[name]
        self.observation_spec["policy"] = self._columns(96)

    def _observe(self):
        td = super()._observe()
        parts = [td.pop(name) for name in ("prop", "priv_explicit", "priv_latent", "prop_history")]
        return td.exclude("critic").set("policy", torch.cat(parts, -1))


class HalfMirrored(HiddenPointMass):
    """Mirrors of what actor and critic read, and none of the history."""

    mirrors = {
        name: SignedPermutation(range(width), [-1] * width)
        for name, width in dict(prop=8, priv_explicit=2, priv_latent=6, action=2).items()
    }


FLAT = [
    "--env.name=Flat",
    "--algorithm.actor_groups=policy",
    '--algorithm.widths={"prop": 8, "priv_explicit": 2, "priv_latent": 6, "history": 80}',
]


@pytest.fixture(autouse=True)
def flat_env():
    register_env("Flat", lambda n, **kw: Flat(n, **kw), override=True)
    register_env("HalfMirrored", lambda n, **kw: HalfMirrored(n, **kw), override=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight iterations in one go; the third and the sixth are the history latent's."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(folder, 8, "--export")
    return folder


# Cadence and resumption -----------------------------------------------------------------------------------------------


def test_cadence_and_ramp_by_hand(whole):
    table = rows(whole)
    assert [i for i, row in enumerate(table) if "loss_dagger" in row and row["loss_dagger"] == row["loss_dagger"]] == [
        2,
        5,
    ]
    # Counted before each rollout's PPO: 0 1 2 | 4 5 6 | 8 9; it begins at 2 and takes 6 updates to 0.1.
    weights = [0, 0, 0, 2 / 60, 3 / 60, 4 / 60, 0.1, 0.1]
    assert [row["priv_reg_weight"] for row in table] == pytest.approx(weights)
    for row in table:
        assert row["loss_priv_reg"] == pytest.approx(row["priv_reg_weight"] * row["latent_distance"], rel=1e-4)


@pytest.mark.parametrize("kept", [1, 2, 3, 5, 7])
def test_resumed_at_every_phase_is_the_uninterrupted_run(whole, tmp_path, kept):
    train(tmp_path / "parts", kept)
    train(tmp_path / "parts", 8, resume=True)
    assert rows(tmp_path / "parts") == rows(whole)
    (_, uninterrupted), (_, resumed) = policy_of(whole), policy_of(tmp_path / "parts")
    for name, value in uninterrupted.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_restarted_schedule_leads_the_history_encoder_too(tmp_path):
    train(tmp_path / "run", 2)
    still = ["--resume_schedule=restart", "--algorithm.lr_schedule=constant", "--algorithm.lr=1e-12"]
    train(tmp_path / "run", 3, *still, resume=True)  # the third iteration is the history encoder's
    assert rows(tmp_path / "run")[-1]["loss_dagger"] > 0
    (_, before), (_, after) = (policy_of(tmp_path / "run", f"checkpoint-{n:012d}") for n in (2, 3))
    for name, value in before.state_dict().items():
        if "history" in name:
            torch.testing.assert_close(after.state_dict()[name], value, rtol=0, atol=1e-8)


def test_the_history_encoder_learns_only_in_its_iterations(whole):
    states = [policy_of(whole, f"checkpoint-{i:012d}")[1].state_dict() for i in range(1, 9)]
    for i, (before, after) in enumerate(zip(states[:-1], states[1:], strict=True), start=1):
        moved = {name.split("actor.")[1].split(".")[0] for name in before if not torch.equal(before[name], after[name])}
        others = {"priv_encoder", "estimator", "backbone", "std"}
        assert moved == (others | {"history_encoder"} if i in (2, 5) else others), i


@pytest.mark.parametrize("symmetry", ["none", "augment", "loss"])
def test_one_flat_group_trains_resumes_and_mirrors(tmp_path, symmetry):
    flags = [*FLAT, f"--algorithm.symmetry={symmetry}"]
    whole = RMA.whole_like_parts(tmp_path, 4, 2, *flags)
    assert ("loss_symmetry" in rows(whole)[0]) == (symmetry == "loss")


def test_workers_follow_the_switch(tmp_path):
    """A batch of a worker was acted on with the latent that was chosen before it was asked for."""
    cfg = train_rma.Train(collector="multi_sync", num_workers=1, env=dict(name="HiddenPointMass", num_envs=4))
    net = rma_composition(train_rma.make_policy(cfg, build_env(cfg)))
    acting = rma_policy(net.actor, net.source, latent="switched", estimated=True)
    collector = make_collector(None, acting, frames_per_batch=16, **collector_options(cfg))
    batches = iter(collector)
    try:
        for history in (False, True, False):
            rma_composition(acting).use_history(history)
            batch = next(batches).clone()
            chosen, other = (
                rma_policy(net.actor, net.source, latent=name, estimated=True)(batch.clone())["loc"]
                for name in (("history", "privileged") if history else ("privileged", "history"))
            )
            torch.testing.assert_close(batch["loc"], chosen)
            assert not torch.allclose(batch["loc"], other)
    finally:
        collector.shutdown()


# What is deployed -----------------------------------------------------------------------------------------------------


def test_the_run_keeps_evaluates_and_exports_the_deployed_policy(whole, capsys, monkeypatch):
    cfg, policy = policy_of(whole, "best")
    assert policy.in_keys == ["prop", "prop_history"]
    net = rma_composition(policy)
    assert net.latent == "history" and net.estimated
    spec = PolicySpec.model_validate_json((whole / "policy" / "policy_spec.json").read_text())
    assert [group.key for group in spec.observations] == ["prop", "prop_history"]
    assert spec.model.verification is not None
    monkeypatch.setitem(sys.modules, "train_rma", train_rma)
    capsys.readouterr()
    load_script("evaluate").main([str(whole), "--json"])
    assert json.loads(capsys.readouterr().out)["return_mean"] == pytest.approx(evaluate_run(cfg, policy)["return_mean"])


def test_the_robot_trains_and_exports(tmp_path, monkeypatch):
    pytest.importorskip("mujoco", minversion="3.17")
    flags = ["--env.name=QuadrupedTerrain", "--env.kwargs.num_threads=1", "--env.kwargs.episode_seconds=0.5"]
    flags += ["--algorithm.scan_hidden=8,4", '--env.kwargs.kinds=["rough"]']
    train(tmp_path / "run", 3, *flags, "--export")
    spec = PolicySpec.model_validate_json((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    assert [group.key for group in spec.observations] == ["prop", "scan", "prop_history"]


# Mistakes -------------------------------------------------------------------------------------------------------------


@refusals(
    """
    --env.name=PointMass -> lacks ['prop', 'priv_explicit', 'priv_latent', 'prop_history']
    --algorithm.actor_groups=prop,priv_explicit,priv_latnt,prop_history -> lacks ['priv_latnt']; its groups
    --algorithm.actor_groups=prop,prop_history -> names 2 groups ['prop', 'prop_history']; expected those of
    --algorithm.critic_groups=crtic -> 'crtic' does not exist. Groups of this environment
    --env.name=Flat --algorithm.actor_groups=policy -> 753 wide, laid out as prop 53 | scan 132 | priv
    --algorithm.actor_groups=prop,priv_explicit,priv_latent,critic -> A history of 
    --algorithm.actor_groups=prop,prop,priv_latent,prop_history -> names ['prop'] more than once
    --env.action_mode=squash -> unsquashed Gaussian; got env.action_mode 'squash'
    --algorithm.symmetry=augment -> Symmetry needs a mirror for ['prop'
    --env.name=HalfMirrored --algorithm.symmetry=augment -> Symmetry needs a mirror for ['prop_history']
    --algorithm.symmetry=loss -> MirrorLoss needs a mirror for ['prop'
    --algorithm.dagger_update_freq=0 -> algorithm.dagger_update_freq = '0'
    '--algorithm.priv_hidden=[]' -> algorithm.priv_hidden
    --algorithm.widths.props=8 -> widths names ['props']; expected prop, scan
    """
)
def test_mistakes_name_the_fix(refuses, flags, expected):
    refuses(RMA, [*TINY, *flags], expected)


def test_a_checkpoint_of_another_model_is_refused_by_its_first_difference(whole, tmp_path):
    cfg, policy = policy_of(whole)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    train(tmp_path / "other", 1, "--algorithm.priv_hidden=6,4")
    with pytest.raises(Exception, match=r"does not fit this policy: .*shape.*Nothing was loaded"):
        load_policy_weights(policy, tmp_path / "other", "latest")
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


def test_a_run_too_short_for_its_history_encoder_says_so(tmp_path, caplog):
    train(tmp_path / "run", 2)
    assert "This run has 2 iterations and the history encoder is trained once in 3" in caplog.text
    caplog.clear()
    train(tmp_path / "longer", 3)
    assert "history encoder" not in caplog.text


def test_defaults_are_those_of_the_source():
    cfg = RMAConfig()
    assert (cfg.lr, cfg.estimator_lr, cfg.entropy_coeff, cfg.dagger_update_freq) == (2e-4, 1e-4, 0.01, 20)
    assert cfg.ramp_options() == dict(start=0.0, end=0.1, begin=2000, length=3000)
    assert sum(cfg.widths.values()) == 753


@pytest.mark.extended
def test_two_processes_keep_one_model(tmp_path):
    """Under torchrun: gradients of all three optimizers are averaged, and a resumed run is the uninterrupted one."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(iterations, *flags):
        command = [*launcher, str(EXAMPLES / "train_rma.py"), f"--total_frames={2 * FRAMES * iterations}", *flags]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    start(4, f"--run_dir={tmp_path / 'whole'}", "--quiet", *TINY)
    start(3, f"--run_dir={tmp_path / 'parts'}", "--quiet", *TINY)
    start(4, f"--resume={tmp_path / 'parts'}")
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts") and len(rows(tmp_path / "whole")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_history_replaces_what_is_hidden(tmp_path, seed):
    """The deployed policy keeps 90 % of the teacher's return and is above the same network that is told nothing."""
    returns = {}
    for name, hidden in (("rma", "false"), ("blind", "true")):
        flags = [f"--seed={seed}", f"--env.kwargs.hidden={hidden}", "--quiet", "--num_threads=1"]
        train_rma.main([f"--run_dir={tmp_path / name}", "--evaluation.interval_iterations=1000", *flags])
        cfg, policy = policy_of(tmp_path / name)
        net = rma_composition(policy)
        for composition, acting in (("", policy), ("-teacher", rma_policy(net.actor, net.source, estimated=True))):
            returns[name + composition] = evaluate_run(cfg, acting, num_episodes=512, seed=777)["return_mean"]
    assert returns["rma"] >= 0.9 * returns["rma-teacher"] and returns["rma"] > returns["blind"]
