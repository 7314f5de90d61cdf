"""FlashSAC beside plain modules, and its replay beside TorchRL's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import train_flashsac
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import MultiStepTransform

from benchmarks.environments import ACTIONS, OBSERVATION
from benchmarks.measuring import Row, Settings, alternate, make_row, seconds
from benchmarks.plain_flashsac import PlainFlashSAC
from benchmarks.trainers import Trainer, compile_loss
from edenrl.collectors import NStepReplayBuffer
from edenrl.modules import flash_actor, flash_critic, unit_norm_hook
from edenrl.objectives import FlashSACLoss

N_STEPS, BATCH = 3, 2048
ENVS = 100  # rows of the replay buffers
CHUNK = 100  # steps that are added to them at a time


class FlashSAC(Trainer):
    """The update of ``train_flashsac.py`` with its default networks."""

    def __init__(self, settings: Settings, **algorithm: Any) -> None:
        super().__init__(train_flashsac.Train(total_frames=1_000_000, algorithm=algorithm), settings)
        bounds = Bounded(-1, 1, (ACTIONS,))
        actor = flash_actor({"observation": OBSERVATION}, bounds, **self.algo.network_options("actor"))
        critic = flash_critic({"observation": OBSERVATION}, ACTIONS, **self.algo.network_options("critic"))
        self.loss = FlashSACLoss(actor.to(settings.device), critic.to(settings.device), **self.algo.loss_options())
        self.loss.to(settings.device)
        self.steps = {}
        for part, parameters in self.loss.parameter_groups().items():
            every = 1 if part == "critic" else self.algo.actor_delay
            self.steps[part] = self.gradient_step(self.loss, {f"{part}_optimizer": parameters}, every=every)
        unit_norm_hook(self.steps["policy"].optimizers["policy_optimizer"], actor)
        unit_norm_hook(self.steps["critic"].optimizers["critic_optimizer"], critic)

    def learn(self, rollout: TensorDictBase) -> None:
        """One update; every second one is of the actor, too."""
        train_flashsac.update(self, self.loss, self.steps, rollout, self.algo.actor_delay)

    def plain(self) -> PlainFlashSAC:
        """The same algorithm in plain modules, with the same weights."""
        algo = self.algo
        return PlainFlashSAC(self.loss, (algo.actor_dim, algo.critic_dim), algo.actor_blocks)


def random_batch(size: int, device: str) -> TensorDict:
    """Transitions as the replay buffer samples them."""
    ends = {
        "observation": torch.randn(size, OBSERVATION),
        "reward": 0.1 * torch.randn(size, 1),
        "terminated": torch.rand(size, 1) < 0.05,
    }
    batch = TensorDict(observation=torch.randn(size, OBSERVATION), next=ends, batch_size=[size])
    batch["action"] = torch.rand(size, ACTIONS) * 2 - 1
    batch["steps_to_next_obs"] = torch.full((size, 1), N_STEPS)
    return batch.to(device)


def update(settings: Settings) -> Iterator[Row]:
    size = 256 if settings.quick else BATCH
    batch = random_batch(size, settings.device)
    ours = FlashSAC(settings)
    plain = ours.plain()
    compile_loss(ours.loss, settings)

    def two(update: Callable[[TensorDict], None]) -> Callable[[], float]:
        """One update with the actor and one without."""

        def run() -> None:
            ours.metrics.clear()
            update(batch)
            update(batch)

        return seconds(run, settings.device)

    cases = {"ours": two(ours.learn), "plain": two(plain.update)}
    times = alternate(cases, settings.repeats, settings.warmups)
    milliseconds = {name: [1e3 * value / 2 for value in values] for name, values in times.items()}
    work = f"update, batch {size}"
    yield make_row(
        "flashsac", work, "ms", milliseconds["ours"], "plain eager torch", milliseconds["plain"], better="lower"
    )


def our_buffer(size: int, device: str) -> NStepReplayBuffer:
    return NStepReplayBuffer(size, n_steps=N_STEPS, batch_size=BATCH, device=device)


def torchrl_buffer(size: int, device: str) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(size, device=device), batch_size=BATCH)


def transitions(size: int, device: str) -> Iterator[TensorDict]:
    """Random rollouts ``[N, T]``, `size` steps in all; every episode has as many steps as a rollout."""
    before = torch.randn(ENVS, OBSERVATION, device=device)
    for _ in range(size // (ENVS * CHUNK)):
        after = torch.randn(ENVS, CHUNK, OBSERVATION, device=device)
        truncated = torch.zeros(ENVS, CHUNK, 1, dtype=torch.bool, device=device)
        truncated[:, -1] = True
        ends = {
            "observation": after,
            "reward": torch.randn(ENVS, CHUNK, 1, device=device),
            "terminated": torch.zeros_like(truncated),
            "truncated": truncated,
            "done": truncated.clone(),
        }
        observation = torch.cat([before.unsqueeze(1), after[:, :-1]], 1)
        action = torch.rand(ENVS, CHUNK, ACTIONS, device=device) * 2 - 1
        yield TensorDict(observation=observation, action=action, next=ends, batch_size=[ENVS, CHUNK])
        before = torch.randn(ENVS, OBSERVATION, device=device)


def extend_torchrl(buffer: TensorDictReplayBuffer, multi: MultiStepTransform, rollout: TensorDict) -> None:
    """Adds n-step transitions with both of their observations."""
    buffer.extend(multi(rollout.clone(False)).reshape(-1))


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state dictionary."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, TensorDictBase):
        return state.bytes()
    if isinstance(state, dict):
        return sum(state_bytes(value) for value in state.values())
    return 0


def replay(settings: Settings) -> Iterator[Row]:
    size = 50_000 if settings.quick else 1_000_000
    ours, theirs = our_buffer(size, settings.device), torchrl_buffer(size, settings.device)
    multi = MultiStepTransform(n_steps=N_STEPS, gamma=0.99)
    for rollout in transitions(size, settings.device):
        ours.extend(rollout)
        extend_torchrl(theirs, multi, rollout)
    peer, work = "TorchRL TensorDictReplayBuffer", f"{size:,} transitions, n = {N_STEPS}"
    memory = [[state_bytes(buffer.state_dict()) / 1e6] for buffer in (ours, theirs)]
    yield make_row("replay", f"memory, {work}", "MB", memory[0], peer, memory[1], better="lower")
    cases = {"ours": seconds(ours.sample, settings.device), "theirs": seconds(theirs.sample, settings.device)}
    times = alternate(cases, 5 * settings.repeats, warmups=3)
    milliseconds = {name: [1e3 * value for value in values] for name, values in times.items()}
    sample = f"sample of {BATCH}, {work}"
    yield make_row("replay", sample, "ms", milliseconds["ours"], peer, milliseconds["theirs"], better="lower")
