"""A real mjlab task on the CPU, through TorchRL's wrapper and through the adapter of vector environments.

mjlab needs MuJoCo 3 and its own rsl_rl, so this runs in an environment of its own:

    pip install mjlab torchrl tensordict gymnasium pydantic pydantic-settings tqdm pytest
    pip install --no-deps -e .
    pytest tests/envs/test_mjlab.py

The first run compiles the simulator's kernels, which takes minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase
from torchrl.envs.utils import check_env_specs

from edenrl.collectors import Collector
from edenrl.envs import VecEnvAdapter, make_env, wrap_env
from edenrl.modules import make_actor, observation_groups, value_critic
from edenrl.objectives import GAE, PPOLoss
from edenrl.optim import GradientStep
from edenrl.training import rollout_metrics

pytest.importorskip("mjlab", reason="needs mjlab: see the top of this file")

TASK = "Mjlab-Velocity-Flat-Unitree-Go1"
LIMIT = 5


def config() -> Any:
    import mjlab.tasks  # noqa: F401
    from mjlab.tasks.registry import load_env_cfg

    cfg = load_env_cfg(TASK)
    cfg.scene.num_envs = 4
    cfg.seed = 0
    # Control runs at 50 Hz: episodes of five steps, all of which end by time-out unless the robot falls.
    cfg.episode_length_s = 0.02 * LIMIT
    return cfg


def through_torchrl() -> EnvBase:
    return make_env(f"mjlab:{TASK}", 4, seed=0, cfg=config())


def through_the_adapter() -> EnvBase:
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import RslRlVecEnvWrapper

    return VecEnvAdapter(RslRlVecEnvWrapper(ManagerBasedRlEnv(config(), device="cpu")))


def collect(env: EnvBase, actor: Any = None) -> TensorDictBase:
    collector = Collector(wrap_env(env), actor, frames_per_batch=4 * 12, total_frames=-1)
    return next(iter(collector))


@pytest.mark.parametrize("build", [through_torchrl, through_the_adapter])
def test_groups_time_outs_and_one_update(build: Any) -> None:
    env = build()
    groups = observation_groups(env.observation_spec)
    simulator = env.inner.unwrapped if isinstance(env, VecEnvAdapter) else env._env
    assert groups == {name: size for name, (size,) in simulator.observation_manager.group_obs_dim.items()}
    assert set(groups) == {"actor", "critic"} and env.action_spec.shape == (4, 12)

    actor = make_actor({"actor": groups["actor"]}, env.action_spec_unbatched, hidden=(32,), init_std=0.1)
    critic = value_critic({"critic": groups["critic"]}, hidden=(32,))
    data = collect(env, actor)
    after = data["next"]
    ends = after["step_count"] == LIMIT
    assert torch.equal(after["truncated"], ends) and not after["terminated"].any()
    assert ends.sum(1).flatten().tolist() == [2] * 4

    known = build is through_torchrl
    at_end, acted_on = after["actor"][ends.squeeze(-1)], data["actor"][ends.squeeze(-1)]
    assert (at_end != acted_on).any() == known, "the true last observation, or the one acted on"
    starts = data["step_count"].squeeze(-1) == 0
    running = ~ends.squeeze(-1)[:, :-1]
    assert torch.equal(after["actor"][:, :-1][running], data["actor"][:, 1:][running])
    assert starts.sum(1).tolist() == [3] * 4
    if not known:
        assert torch.equal(after["final_obs_missing"], ends) and env.final_obs == "missing"
        metrics = rollout_metrics(data)
        assert metrics["episode/Episode_Termination/time_out"].item() == 4
        assert metrics["episode/Episode_Reward/upright"].item() > 0

    loss = PPOLoss(actor, critic)
    GAE(gamma=0.99, lmbda=0.95, value_network=critic)(data)
    step = GradientStep(loss, torch.optim.Adam(loss.parameters(), lr=1e-3), max_grad_norm=1.0)
    before = [parameter.detach().clone() for parameter in actor.parameters()]
    step(loss(data.exclude("next", "collector").reshape(-1)))
    assert any(not torch.equal(old, new) for old, new in zip(before, actor.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in actor.parameters())


def test_specs_and_partial_reset_of_the_adapter() -> None:
    env = through_the_adapter()
    check_env_specs(env)
    root = env.step_and_maybe_reset(env.rand_action(env.reset()))[1]
    assert env.episode_length_buf.tolist() == [1] * 4 and env.max_episode_length == LIMIT
    reset = env.reset(root.clone().set("_reset", torch.tensor([[True], [False], [False], [False]])))
    assert env.episode_length_buf.tolist() == [0, 1, 1, 1]
    assert torch.equal(reset["actor"][1:], root["actor"][1:]) and not torch.equal(reset["actor"][0], root["actor"][0])
