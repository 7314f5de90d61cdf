"""The FlashSAC script: resumption with its buffer, refusals before anything is built, evaluation and export."""

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torchrl.data import Bounded
from trainer_cases import EXAMPLES, TRAINERS, Script, hide_newest, load_script, refusals, rows

from edenrl.config import parse_cli
from edenrl.config.presets import FLASHSAC_PROFILES
from edenrl.envs import PointMass, VecEnvAdapter, action_box, as_vec_env, register_env
from edenrl.modules import UnitBatchNorm, UnitLinear
from edenrl.objectives import FlashSACLoss
from edenrl.training import build_env, collector_options, read_metrics, run_script

TINY = [flag.replace("min_buffer=20", "min_buffer=40") for flag in TRAINERS["FlashSAC"].flags]
FLASHSAC = Script("train_flashsac", [*TINY, "--quiet"], 20)
train, train_flashsac, policy_of, FRAMES = FLASHSAC.train, FLASHSAC.module, FLASHSAC.policy, FLASHSAC.frames


@pytest.mark.parametrize("env", ["PointMass", "Pendulum-v1"])
def test_resumed_run_is_the_uninterrupted_run(tmp_path, env):
    flags = (f"--env.name={env}", "--algorithm.buffer_dtype=bfloat16")
    run_dir = FLASHSAC.whole_like_parts(tmp_path, 20, 9, *flags, dies=True)
    last = rows(run_dir)[-1]
    assert last["replay_size"] == 160 and last["lr"] < 1e-3 and last["skipped_updates"] == 0
    for layer in FLASHSAC.policy(run_dir).modules():
        if isinstance(layer, UnitLinear):
            assert (layer.weight.norm(dim=1) - 1).abs().max() < 1e-5
        if isinstance(layer, UnitBatchNorm):
            total = layer.scale.square().sum() + layer.shift.square().sum()
            assert abs(float(total.detach()) / len(layer.scale) - 1) < 1e-5


def on_spheres(net):
    for layer in net.modules():
        if isinstance(layer, UnitLinear):
            assert (layer.weight.norm(dim=-1) - 1).abs().max() < 1e-5
        if isinstance(layer, UnitBatchNorm):
            total = layer.scale.square().sum(-1) + layer.shift.square().sum(-1)
            assert (total / layer.scale.shape[-1] - 1).abs().max() < 1e-5


def test_order_of_an_update_and_spheres_after_every_step(tmp_path, monkeypatch):
    order, seen = [], {}

    def watch(name, letter):
        original = getattr(FlashSACLoss, name)

        def watched(loss, *args):
            order.append(letter)
            before = [parameter.detach().clone() for parameter in loss.target_critic.parameters()]
            out = original(loss, *args)
            for network in (loss.actor_network, loss.critic_network):
                on_spheres(network)
            # Only the last call of an update moves the target's parameters.
            after = list(loss.target_critic.parameters())
            assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True)) == (letter == "p")
            seen["alpha"] = float(loss.alpha)
            return out

        monkeypatch.setattr(FlashSACLoss, name, watched)

    for name, letter in (("actor_loss", "a"), ("temperature_loss", "t"), ("critic_loss", "c"), ("update_target", "p")):
        watch(name, letter)
    train(tmp_path / "run", 20, "--algorithm.updates_per_step=3", "--algorithm.actor_delay=3")
    # Forty transitions of the 400 come first, an update begins with the step that completes them.
    assert "".join(order) == "atcpcpcp" * 91
    assert seen["alpha"] != pytest.approx(0.001) and rows(tmp_path / "run")[-1]["lr"] == pytest.approx(3e-4, rel=0.01)


def test_without_its_buffer_a_resumed_run_fills_a_new_one(tmp_path):
    train(tmp_path / "run", 10, "--algorithm.save_buffer=false")
    train(tmp_path / "run", 14, resume=True)
    sizes = [row["replay_size"] for row in rows(tmp_path / "run")]
    assert sizes[9] == 160 and sizes[10:] == [20, 40, 60, 80]
    assert not list((tmp_path / "run").glob("error*"))


def test_a_run_that_is_made_longer_goes_on_at_once(tmp_path):
    """Thirty times as long, its uniform phase would be thirty times as long as well."""
    train(tmp_path / "run", 2, "--algorithm.min_buffer=400", "--algorithm.buffer_size=1000")
    train(tmp_path / "run", 60, resume=True)
    assert all(row.get("alpha") for row in rows(tmp_path / "run")[1:])


def test_length_is_given_once(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("edenrl.training.run.build_env", lambda *a: pytest.fail("an environment was built"))
    for flags, given in (
        (["--env.name=CartPole-v1"], "neither"),
        (["--total_frames=100", "--max_iterations=3"], "both, 100 and 3, was given"),
    ):
        with pytest.raises(SystemExit):
            run_script(lambda flags=flags: train_flashsac.main(flags))
        message = capsys.readouterr().err
        assert "total_frames or max_iterations" in message and given in message


def test_iterations_count_as_given(tmp_path):
    train_flashsac.main(
        [*TINY, "--quiet", f"--run_dir={tmp_path / 'run'}", "--total_frames=None", "--max_iterations=3"]
    )
    assert [row["frames"] for row in rows(tmp_path / "run")] == [20, 40, 60]


@refusals(
    """
    --env.action_mode=clip -> set env.action_mode to 'squash'
    --env.name=CartPole-v1 --total_frames=100 -> or an algorithm for discrete actions such as PPO
    --algorithm.buffer_size=30 -> min_buffer 40 is more than buffer_size 30
    --algorithm.actor_groups=scam -> Observation group 'scam' does not exist
    --profile=gpu -> profile = 'gpu'
    --algorithm.batch_size=1 -> algorithm.batch_size = '1'
    --env.name=HalfOpen -> component 0 has [-1, inf]
    --env.name=HalfOpen -> or let algorithm.action_bound_scale declare them where the environment has none
    --env.name=HalfOpen -> an algorithm without a tanh, such as PPO
    --algorithm.action_bound_scale=0 -> algorithm.action_bound_scale = '0'
    """
)
def test_mistakes_name_the_fix(refuses, flags, expected):
    class HalfOpen(PointMass):
        def __init__(self, num_envs, **kwargs):
            super().__init__(num_envs, **kwargs)
            self.action_spec = Bounded(-1.0, torch.inf, self.action_spec.shape)

    register_env("HalfOpen", lambda n, **kw: HalfOpen(n, **kw), override=True)
    refuses(FLASHSAC, [*TINY, "--total_frames=100", *flags], expected)


def test_profiles_stand_below_presets_and_flags():
    def parse(*argv):
        presets = {"Some": {"total_frames": 7, "algorithm": {"tau": 0.5}}}
        profiles = FLASHSAC_PROFILES
        return parse_cli(train_flashsac.Train, ["--env.name=Some", *argv], presets=presets, profiles=profiles)

    full, cpu = parse(), parse("--profile=cpu", "--algorithm.lr=0.1")
    assert (full.algorithm.batch_size, full.algorithm.buffer_size) == (2048, 10_000_000)
    assert (cpu.algorithm.batch_size, cpu.algorithm.tau, cpu.algorithm.lr) == (128, 0.5, 0.1)


def test_speedups_fall_back_on_a_cpu_with_one_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "edenrl"):
        train(tmp_path / "run", 11, "--algorithm.precision=bfloat16", "--algorithm.compile", "--device=cpu")
    warned = [record.message for record in caplog.records if "float32" in record.message]
    assert warned == ["On a CPU training stays in float32 and uncompiled; precision=bfloat16, compile=True."]


def test_reduced_precision_is_compared_with_float32_before_it_is_used(tmp_path, monkeypatch):
    """On a CPU the script would fall back; here it believes in a device that does not."""
    monkeypatch.setattr(train_flashsac, "speedups", lambda *_: (torch.bfloat16, False))
    train(tmp_path / "run", 11)
    assert rows(tmp_path / "run")[-1]["alpha"] > 0
    critic_loss = FlashSACLoss.critic_loss

    def rounded(loss, batch):
        losses = critic_loss(loss, batch)
        share = 2.0 if torch.is_autocast_enabled("cpu") else 1.0
        return losses.set("loss_critic", losses["loss_critic"] * share)

    monkeypatch.setattr(FlashSACLoss, "critic_loss", rounded)
    with pytest.raises(ValueError, match="In bfloat16 the first update is not that of float32: loss_critic"):
        train(tmp_path / "other", 11)
    # It is the first update that is compared, not those of a resumed run.
    train(tmp_path / "run", 13, resume=True)
    assert len(rows(tmp_path / "run")) == 13


def test_short_runs_begin_to_learn_early_and_say_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "edenrl"):
        train(tmp_path / "run", 3, "--algorithm.min_buffer=100")
    assert "min_buffer is 6 in this run of 60 frames, not 100." in caplog.text
    assert rows(tmp_path / "run")[-1]["alpha"] > 0


def test_asymmetric_boxes_are_scaled(tmp_path, monkeypatch):
    class Asymmetric(PointMass):
        """Accepts actions in [-1, 3] and shows them."""

        def __init__(self, num_envs, **kwargs):
            super().__init__(num_envs, **kwargs)
            self.action_spec = Bounded(-1.0, 3.0, self.action_spec.shape)

        def _step(self, tensordict):
            seen.append(tensordict["action"].clone())
            tensordict = tensordict.clone(False)
            return super()._step(tensordict.set("action", tensordict["action"].clamp(-1, 1)))

    seen, learned, critic_loss = [], [], FlashSACLoss.critic_loss

    def recorded(loss, batch):
        learned.append(batch["action"])
        return critic_loss(loss, batch)

    monkeypatch.setattr(FlashSACLoss, "critic_loss", recorded)
    register_env("Asymmetric", lambda n, **kw: Asymmetric(n, **kw), override=True)
    train(tmp_path / "run", 20, "--env.name=Asymmetric")
    actions = torch.cat(seen[:10])  # uniform at first
    assert float(actions.min()) < -0.7 and float(actions.max()) > 2.7 and abs(float(actions.mean()) - 1) < 0.4
    # The networks see the same actions in [-1, 1].
    actions = torch.cat(learned[:10])
    assert -1 <= float(actions.min()) < -0.8 and 0.8 < float(actions.max()) <= 1


class Unboxed:
    """PointMass as an rsl_rl environment that declares no action box; remembers what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, num_envs, *, device, seed, **kwargs):
        inner = as_vec_env(PointMass(num_envs, device=device, seed=seed, **kwargs))
        inner.single_action_space = None
        step = inner.step

        def recorded(actions):
            self.seen.append(actions.clone())
            return step(actions)

        inner.step = recorded
        return VecEnvAdapter(inner)


@pytest.mark.parametrize(("scale", "seed"), [(None, 3), (0.3, 4), (2.5, 5)])
def test_an_environment_without_a_box_gets_one(tmp_path, caplog, capsys, monkeypatch, scale, seed):
    pytest.importorskip("onnxruntime")
    unboxed = Unboxed()
    register_env("Unboxed", unboxed, override=True)
    flags = [] if scale is None else [f"--algorithm.action_bound_scale={scale}"]
    scale = 1.0 if scale is None else scale
    with caplog.at_level(logging.WARNING, "edenrl"):
        train(tmp_path / "run", 6, "--env.name=Unboxed", f"--seed={seed}", "--export", *flags)
    said = [record.message for record in caplog.records if "action_bound_scale" in record.message]
    assert f"[-{scale:g}, {scale:g}]" in said[0] and "Unboxed declares no" in said[0]
    # Training with uniform actions and with the policy's, evaluation, and the check of the export.
    actions = torch.cat(unboxed.seen)
    assert 0.8 * scale < actions.abs().max() <= scale * (1 + 1e-6)
    assert rows(tmp_path / "run")[-1]["loss_critic"] > 0
    assert rows(tmp_path / "run")[-1]["action_saturation"] < 0.2
    spec = json.loads((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    assert spec["actions"]["low"] == [-scale] * 2 and spec["actions"]["high"] == [scale] * 2
    monkeypatch.setitem(sys.modules, "train_flashsac", train_flashsac)
    capsys.readouterr()
    load_script("evaluate").main([str(tmp_path / "run"), "--json", "--checkpoint", "latest"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 4


def test_workers_and_single_environments_get_the_same_box():
    register_env("Unboxed", Unboxed(), override=True)
    flags = ["--env.name=Unboxed", "--env.num_envs=4", "--total_frames=100", "--algorithm.action_bound_scale=1.5"]
    cfg = parse_cli(train_flashsac.Train, flags)
    for env in (build_env(cfg), collector_options(cfg)["worker_env"](1)):
        low, high = action_box(env)
        assert low.tolist() == [-1.5] * 2 and high.tolist() == [1.5] * 2


def test_a_declared_box_stays():
    cfg = parse_cli(train_flashsac.Train, ["--env.name=Pendulum-v1", "--total_frames=100"])
    low, high = action_box(build_env(cfg))
    assert low.tolist() == [-2.0] and high.tolist() == [2.0]


def test_the_quadruped_runs_by_name(tmp_path):
    pytest.importorskip("mujoco", minversion="3.17")
    train(tmp_path / "run", 4, "--env.name=Quadruped", "--env.kwargs.episode_seconds=0.5", "--env.kwargs.num_threads=1")
    assert rows(tmp_path / "run")[-1]["loss_critic"] > 0


def test_evaluation_and_export_find_the_script_of_the_run(tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    train(tmp_path / "run", 4, "--export", "--env.name=Pendulum-v1")
    assert (tmp_path / "run" / "policy" / "policy_spec.json").exists()
    monkeypatch.setitem(sys.modules, "train_flashsac", train_flashsac)
    capsys.readouterr()
    load_script("evaluate").main([str(tmp_path / "run"), "--json", "--checkpoint", "latest"])
    assert json.loads(capsys.readouterr().out)["episodes"] == 4
    spec = json.loads((tmp_path / "run" / "policy" / "policy_spec.json").read_text())
    assert spec["actions"]["low"] == [-2.0] and spec["actions"]["high"] == [2.0]


def test_workers_collect_with_noise_of_their_own(tmp_path):
    train(tmp_path / "run", 4, "--collector=multi_sync", "--num_workers=2")
    assert [row["replay_size"] for row in rows(tmp_path / "run")] == [20, 40, 60, 80]


@pytest.mark.extended
def test_two_processes_share_statistics_and_resume(tmp_path):
    def torchrun(*flags):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "EDENRL_TRACEBACK": "1"}
        script = [str(EXAMPLES / "train_flashsac.py"), *TINY, "--quiet", "--total_frames=400", *flags]
        done = subprocess.run([*command, *script], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]

    torchrun(f"--run_dir={tmp_path / 'whole'}")
    torchrun(f"--run_dir={tmp_path / 'parts'}", "--checkpoint.interval_iterations=6")
    hide_newest(tmp_path / "parts")
    torchrun(f"--resume={tmp_path / 'parts'}")
    assert len(rows(tmp_path / "whole")) == 10 and rows(tmp_path / "whole") == rows(tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "wanted", "flags"),
    [
        ("Pendulum-v1", -200, []),  # 2 minutes of one core
        ("InvertedPendulum-v5", 950, []),  # 2 minutes
        ("HalfCheetah-v5", 2800, ["--total_frames=150_000", "--seed=1"]),  # 6 minutes
    ],
)
def test_learns(tmp_path, env, wanted, flags):
    flags = [f"--env.name={env}", "--profile=cpu", "--num_threads=1", "--quiet", *flags]
    train_flashsac.main([*flags, f"--run_dir={tmp_path / 'run'}"])
    assert read_metrics(tmp_path / "run" / "metrics.csv")[-1]["eval/return_mean"] >= wanted
