"""Our loss inside TorchRL's own trainer."""

import torch
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.trainers.algorithms import PPOTrainer

from edenrl.envs import make_env, wrap_env
from edenrl.modules import make_actor, value_critic
from edenrl.objectives import GAE, PPOLoss


def test_ppo_loss_trains_inside_torchrls_trainer():
    torch.manual_seed(0)
    env = make_env("CartPole-v1", 8, seed=0)
    policy = make_actor({"observation": 4}, env.action_spec_unbatched, hidden=(32,), activation="tanh")
    critic = value_critic({"observation": 4}, hidden=(32,), activation="tanh")
    loss = PPOLoss(policy, critic, critic_coeff=0.5)
    collector = Collector(
        wrap_env(env, reward_scale=0.1),
        policy,
        frames_per_batch=512,
        total_frames=512 * 40,
        auto_register_policy_transforms=False,
    )
    lengths = []
    trainer = PPOTrainer(
        collector=collector,
        total_frames=512 * 40,
        frame_skip=1,
        optim_steps_per_batch=8,
        num_epochs=4,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=3e-3),
        progress_bar=False,
        replay_buffer=TensorDictReplayBuffer(
            storage=LazyTensorStorage(512), sampler=SamplerWithoutReplacement(), batch_size=128
        ),
        gae=GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True),
        enable_logging=False,
    )
    trainer.register_op(
        "batch_process", lambda batch: lengths.append(float(batch["next", "step_count"].float().mean())) or batch
    )
    trainer.train()
    early, late = sum(lengths[:5]) / 5, sum(lengths[-5:]) / 5
    assert late > 2 * early, f"mean step count went from {early} to {late}"
