"""Peak memory of an iteration of PPO and of an update of FlashSAC with a full replay buffer."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torchrl.envs import MultiStepTransform

from benchmarks import flashsac, on_policy
from benchmarks.measuring import RSL_RL, Row, Settings, in_process, make_row
from benchmarks.trainers import PPO, compile_loss


def our_ppo(settings: Settings, num_envs: int) -> None:
    trainer = PPO(num_envs, settings)
    for _ in range(2):
        trainer.iterate()


def rsl_rl_ppo(settings: Settings, num_envs: int) -> None:
    trainer = on_policy.RslRl(num_envs, settings)
    for _ in range(2):
        trainer.iterate()


def our_flashsac(settings: Settings, size: int) -> None:
    trainer = flashsac.FlashSAC(settings)
    compile_loss(trainer.loss, settings)
    buffer = flashsac.our_buffer(size, settings.device)
    for rollout in flashsac.transitions(size, settings.device):
        buffer.extend(rollout)
    for _ in range(2):
        trainer.learn(buffer.sample())


def plain_flashsac(settings: Settings, size: int) -> None:
    trainer = flashsac.FlashSAC(settings).plain()
    buffer = flashsac.torchrl_buffer(size, settings.device)
    multi = MultiStepTransform(n_steps=flashsac.N_STEPS, gamma=0.99)
    for rollout in flashsac.transitions(size, settings.device):
        flashsac.extend_torchrl(buffer, multi, rollout)
    for _ in range(2):
        batch = buffer.sample()
        # TorchRL's transform leaves out how long a window is; all but the last two of an episode have this length.
        steps = torch.full((len(batch), 1), flashsac.N_STEPS, device=settings.device)
        trainer.update(batch.set("steps_to_next_obs", steps))


def process_peak() -> float:
    """Largest resident memory of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss of Linux may be that of the process that started this one
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return 1024.0 * float(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else 1024 * peak)


def measured(work: str, settings: Settings, size: int) -> float:
    """Peak megabytes of a process that does nothing else: on a GPU of the device's memory, else of the process."""
    code = (
        "from benchmarks import memory, measuring\n"
        f"memory.{work}(measuring.{settings!r}, {size})\n"
        f"print(memory.peak_of({settings.device!r}))"
    )
    return float(in_process(code).split()[-1]) / 1e6


def peak_of(device: str) -> float:
    """Peak bytes of this process on a device."""
    if torch.device(device).type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return process_peak()


def peak(settings: Settings) -> Iterator[Row]:
    num_envs = settings.num_envs[-1]
    size = 50_000 if settings.quick else 1_000_000
    theirs = [measured("rsl_rl_ppo", settings, num_envs)] if RSL_RL.installed else None
    ours = [measured("our_ppo", settings, num_envs)]
    work = f"PPO, {num_envs} envs x {on_policy.STEPS}"
    yield make_row("memory", work, "MB at peak", ours, RSL_RL.name, theirs, better="lower", note=RSL_RL.note)
    ours = [measured("our_flashsac", settings, size)]
    theirs = [measured("plain_flashsac", settings, size)]
    peer, work = "plain torch, TorchRL replay", f"FlashSAC, {size:,} transitions"
    yield make_row("memory", work, "MB at peak", ours, peer, theirs, better="lower")
