"""An environment that costs next to nothing, for our trainers and for rsl_rl's runner."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Unbounded

from edenrl.envs.tensor_state import TensorStateEnv

OBSERVATION, ACTIONS, MAX_STEPS = 48, 12, 1000
_POOL = 8  # observations that take turns


class Simulation:
    """Observations from a fixed pool, a reward of the action, episodes that end at different steps."""

    def __init__(self, num_envs: int, widths: Mapping[str, int], device: str) -> None:
        self.num_envs, self.device, self.step = num_envs, device, 0
        self.pool = {name: torch.randn(_POOL, num_envs, width, device=device) for name, width in widths.items()}

    def observe(self) -> dict[str, Tensor]:
        """The observation groups of the current step, as fresh tensors."""
        return {name: values[self.step % _POOL].clone() for name, values in self.pool.items()}

    def reward(self, action: Tensor) -> Tensor:
        """The reward ``[num_envs]``; it goes on to the next observation."""
        self.step += 1
        return 1.0 - 0.1 * action.square().mean(-1)

    def first_steps(self) -> Tensor:
        """Steps that new episodes ``[num_envs]`` count as taken, so that they do not all end together."""
        return torch.randint(MAX_STEPS, (self.num_envs,), device=self.device)


class TrivialEnv(TensorStateEnv):
    """The simulation as a TorchRL environment."""

    def __init__(
        self,
        num_envs: int,
        widths: Mapping[str, int] | None = None,
        device: str = "cpu",
        reward_groups: tuple[str, ...] = (),
    ) -> None:
        self.widths = {"observation": OBSERVATION} if widths is None else dict(widths)
        self.reward_groups = reward_groups
        self.simulation = Simulation(num_envs, self.widths, device)
        super().__init__(num_envs, device=device, max_steps=MAX_STEPS, seed=0)

    def _make_specs(self) -> None:
        if self.reward_groups:
            self._set_specs(ACTIONS, **self.widths, reward_groups=self.reward_groups)
        else:
            self._set_specs(ACTIONS, **self.widths)
        # Without bounds, as most simulators of robots: rsl_rl does not clip, so nothing is clipped here.
        self.action_spec = Unbounded((self.num_envs, ACTIONS), device=self.device)

    def _draw_state(self) -> dict[str, Tensor]:
        return {"steps": self.simulation.first_steps().unsqueeze(-1)}

    def _observe(self) -> TensorDict:
        return self._with_rewards(torch.zeros(self.num_envs, 1, device=self.device))

    def _with_rewards(self, reward: Tensor) -> TensorDict:
        entries: dict[str, Tensor | dict[str, Tensor]] = {**self.simulation.observe()}
        if self.reward_groups:
            entries["reward_groups"] = {name: reward.clone() for name in self.reward_groups}
        return self._pack(entries)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        reward = self.simulation.reward(tensordict["action"]).unsqueeze(-1)
        self._state = {"steps": self._state["steps"] + 1}
        return self._with_rewards(reward).set("reward", reward)


class TrivialVecEnv:
    """The simulation as an rsl_rl ``VecEnv``."""

    max_episode_length, num_actions, cfg = MAX_STEPS, ACTIONS, {"name": "trivial"}

    def __init__(self, num_envs: int, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, device
        self.simulation = Simulation(num_envs, {"observation": OBSERVATION}, device)
        self.episode_length_buf = self.simulation.first_steps()

    def get_observations(self) -> TensorDict:
        return TensorDict(self.simulation.observe(), batch_size=[self.num_envs], device=self.device)

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Tensor]]:
        reward = self.simulation.reward(actions)
        length = self.episode_length_buf + 1
        done = length >= MAX_STEPS
        self.episode_length_buf = torch.where(done, self.simulation.first_steps(), length)
        return self.get_observations(), reward, done.long(), {"time_outs": done}
