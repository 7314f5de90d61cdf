"""FlashSAC's update in plain eager modules: what the library's update is compared with.

``nn.Linear`` and ``nn.BatchNorm1d``, one network per member of the critic, and the default Adam. It computes the same
losses as the library, which a test checks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from benchmarks.environments import ACTIONS, OBSERVATION
from edenrl.objectives import FlashSACLoss


class PlainBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm1d(4 * dim, momentum=0.01), nn.BatchNorm1d(dim, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.bn2(self.w2(F.relu(self.bn1(self.w1(x))))))


class PlainNet(nn.Module):
    def __init__(self, inputs: int, dim: int, blocks: int, *outputs: int) -> None:
        super().__init__()
        self.bn, self.weight = nn.BatchNorm1d(inputs, momentum=0.01), nn.Linear(inputs, dim, bias=False)
        self.blocks = nn.ModuleList(PlainBlock(dim) for _ in range(blocks))
        self.rms = nn.Parameter(torch.ones(dim))
        self.heads = nn.ModuleList(nn.Linear(dim, width, bias=False) for width in outputs)
        self.biases = nn.ParameterList(torch.zeros(width) for width in outputs)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.weight(self.bn(x))
        for block in self.blocks:
            x = block(x)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.rms
        return [head(x) + bias for head, bias in zip(self.heads, self.biases, strict=True)]

    @torch.no_grad()
    def project(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(F.normalize(module.weight, dim=-1))
            elif isinstance(module, nn.BatchNorm1d):
                norm = (module.weight.square().sum() + module.bias.square().sum()).sqrt()
                module.weight.mul_(math.sqrt(len(module.weight)) / norm)
                module.bias.mul_(math.sqrt(len(module.bias)) / norm)
        self.rms.mul_(math.sqrt(len(self.rms)) / self.rms.norm())

    def take(self, net: Any, member: int | None) -> PlainNet:
        """The parameters of one of our networks, or of one of its members."""

        def at(value: Tensor) -> Tensor:
            return (value if member is None else value[member]).detach().clone()

        trunk = net.trunk
        state = {"weight.weight": at(trunk.weight.weight), "rms": at(trunk.post.scale)}
        norms = {"bn": trunk.bn}
        for i, block in enumerate(trunk.blocks):
            norms |= {f"blocks.{i}.bn1": block.bn1, f"blocks.{i}.bn2": block.bn2}
            state |= {f"blocks.{i}.{w}.weight": at(getattr(block, w).weight) for w in ("w1", "w2")}
        heads = [net.mean, net.std] if member is None else [net.head]
        biases = [net.mean_bias, net.std_bias] if member is None else [net.head_bias]
        for i, (head, bias) in enumerate(zip(heads, biases, strict=True)):
            state |= {f"heads.{i}.weight": at(head.weight), f"biases.{i}": at(bias)}
        for name, norm in norms.items():
            state |= {f"{name}.weight": at(norm.scale), f"{name}.bias": at(norm.shift)}
            state |= {f"{name}.{stat}": at(getattr(norm, stat)) for stat in ("running_mean", "running_var")}
            state[f"{name}.num_batches_tracked"] = torch.tensor(0)
        self.load_state_dict(state)
        return self.to(trunk.weight.weight.device)


class PlainFlashSAC:
    def __init__(self, loss: FlashSACLoss, dims: tuple[int, int], blocks: int) -> None:
        actor = loss.actor_network.module[0].module
        self.actor = PlainNet(OBSERVATION, dims[0], blocks, ACTIONS, ACTIONS).take(actor, None)
        self.critics, self.targets = (
            [PlainNet(OBSERVATION + ACTIONS, dims[1], blocks, 101).take(net.module, member) for member in range(2)]
            for net in (loss.critic_network, loss.target_critic)
        )
        self.log_alpha = loss.log_alpha.detach().clone().requires_grad_()
        self.target_entropy = loss.target_entropy
        self.atoms = torch.linspace(-5, 5, 101, device=self.log_alpha.device)
        self.optimizers = [
            torch.optim.Adam(parameters, lr=3e-4)
            for parameters in (
                self.actor.parameters(),
                [self.log_alpha],
                [p for critic in self.critics for p in critic.parameters()],
            )
        ]
        self.updates = 0

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.actor(observation)
        std = (-10 + 6 * (1 + raw.tanh())).exp()
        pre_tanh = torch.distributions.Normal(mean, std).rsample()
        action = pre_tanh.tanh()
        density = torch.distributions.Normal(mean, std).log_prob(pre_tanh)
        jacobian = 2 * (math.log(2) - pre_tanh - F.softplus(-2 * pre_tanh))
        return action, (density - jacobian).sum(-1)

    def actor_step(self, batch: TensorDict) -> None:
        size = len(batch)
        action, log_prob = self.sample(torch.cat([batch["observation"], batch["next", "observation"]]))
        x = torch.cat([batch["observation"], action[:size]], -1)
        for critic in self.critics:
            critic.eval().requires_grad_(False)
        value = torch.stack([(critic(x)[0].softmax(-1) * self.atoms).sum(-1) for critic in self.critics]).amin(0)
        loss = (self.log_alpha.exp().detach() * log_prob[:size] - value).mean()
        for critic in self.critics:
            critic.train().requires_grad_(True)
        alpha_loss = (self.log_alpha.exp() * (-log_prob[:size].detach() - self.target_entropy)).mean()
        for optimizer, each in zip(self.optimizers[:2], (loss, alpha_loss), strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        self.actor.project()

    def critic_loss(self, batch: TensorDict) -> Tensor:
        size, last = len(batch), len(self.atoms) - 1
        with torch.no_grad():
            self.actor.eval()
            next_action, log_prob = self.sample(batch["next", "observation"])
            self.actor.train()
            now = torch.cat([batch["observation"], batch["action"]], -1)
            x = torch.cat([now, torch.cat([batch["next", "observation"], next_action], -1)])
            logits = torch.stack([target(x)[0][size:] for target in self.targets])
            values = (logits.softmax(-1) * self.atoms).sum(-1)
            probs = logits[values.argmin(0), torch.arange(size, device=logits.device)].softmax(-1)
            going = 0.99 ** batch["steps_to_next_obs"] * ~batch["next", "terminated"]
            places = batch["next", "reward"] + going * (self.atoms - self.log_alpha.exp() * log_prob.unsqueeze(-1))
            places = ((places + 5) / 10 * last).clamp(0, last)
            low = places.floor().long()
            high = (low + 1).clamp(max=last)
            target = torch.zeros_like(probs)
            target.scatter_add_(-1, low, probs * (1 - (places - low)))
            target.scatter_add_(-1, high, probs * (places - low))
        return torch.stack(
            [-(target * critic(x)[0][:size].log_softmax(-1)).sum(-1).mean() for critic in self.critics]
        ).mean()

    def update(self, batch: TensorDict) -> None:
        if self.updates % 2 == 0:
            self.actor_step(batch)
        self.updates += 1
        self.optimizers[2].zero_grad()
        self.critic_loss(batch).backward()
        self.optimizers[2].step()
        with torch.no_grad():
            for critic, target in zip(self.critics, self.targets, strict=True):
                critic.project()
                for ours, theirs in zip(target.parameters(), critic.parameters(), strict=True):
                    ours.lerp_(theirs, 0.01)
