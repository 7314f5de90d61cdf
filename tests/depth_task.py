"""A small task with a depth camera, for tests: what the image shows is what the teacher is told by the scan."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, Unbounded

from edenrl.envs.tensor_state import TensorStateEnv
from edenrl.modules import DepthEncoder, DepthPolicy, DepthStudent, RMAActor, rma_policy

WIDTHS = dict(prop=9, scan=4, priv_explicit=3, priv_latent=5, history=90)
IMAGE = (12, 14)


class DepthTask(TensorStateEnv):
    """Two hidden numbers drift; the left and the right half of an image show them, and so does the scan.

    Images are new every 5 steps of the whole batch and at a reset. Episodes last 3 to ``max_steps`` steps, so that rows
    are reset between images too. The true yaw angles (``prop[6:8]``) are the two numbers' sum and difference.
    """

    depth_interval = 5
    open_above = -0.8  # the gate is open in nine of ten rows

    def __init__(self, num_envs, *, device=None, max_steps=12, seed=None, dtype=None):
        self.clock = 0
        super().__init__(num_envs, device=device, max_steps=max_steps, seed=seed, dtype=dtype)

    def _make_specs(self):
        shape = self.batch_size
        groups = {**{k: v for k, v in WIDTHS.items() if k != "history"}, "prop_history": 90, "delta_yaw_ok": 1}
        self.observation_spec = Composite(
            **{name: self._columns(width) for name, width in groups.items()},
            depth=Unbounded((*shape, *IMAGE), dtype=self._float),
            metrics=Composite(steps=self._columns(), shape=shape),
            shape=shape,
        )
        self.action_spec = Bounded(-1.0, 1.0, (*shape, 2), dtype=self._float)
        self.reward_spec = self._columns()
        self.done_spec = self._done_flags()

    def _draw_state(self):
        state = {
            "numbers": self._uniform(-1.0, 1.0, 2),
            "noise": self._uniform(-1.0, 1.0, 9),
            "steps": torch.zeros(self.num_envs, 1, dtype=torch.int64),
            "length": self._uniform(3.0, self.max_steps + 1.0, 1).long(),
        }
        return state | {"image": self._image(state), "history": self._prop(state)[:, None].repeat(1, 10, 1)}

    def _image(self, state):
        image = state["numbers"][:, None, :].repeat_interleave(IMAGE[1] // 2, -1)
        return image.expand(self.num_envs, *IMAGE).clone()

    def _prop(self, state):
        prop = 0.3 * state["noise"]
        prop[:, 6], prop[:, 7] = 0.5 * state["numbers"].sum(-1), 0.5 * state["numbers"].diff(dim=-1)[:, 0]
        return prop

    def _observe(self):
        state = self._state
        zeros = torch.zeros(self.num_envs, 5, dtype=self._float)
        done = state["steps"] >= state["length"]
        return TensorDict(
            {
                "prop": self._prop(state),
                "scan": state["numbers"].repeat(1, 2),
                "priv_explicit": zeros[:, :3].clone(),
                "priv_latent": zeros,
                "prop_history": state["history"].flatten(1).clone(),
                "delta_yaw_ok": (state["noise"][:, :1] > self.open_above).to(self._float),
                "depth": state["image"].clone(),
                "metrics": TensorDict(steps=state["steps"].to(self._float), batch_size=self.batch_size),
                "done": done,
                "terminated": torch.zeros_like(done),
                "truncated": done.clone(),
            },
            batch_size=self.batch_size,
        )

    def _reset(self, tensordict=None, **kwargs):
        if tensordict is None or tensordict.get("_reset", None) is None:
            self.clock = 0
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict):
        state, self.clock = dict(self._state), self.clock + 1
        state["numbers"] = (state["numbers"] + 0.02 * tensordict["action"].clamp(-1, 1)).clamp(-1, 1)
        state["noise"] = self._uniform(-1.0, 1.0, 9)
        state["steps"] = state["steps"] + 1
        state["history"] = torch.cat([state["history"][:, 1:], self._prop(state)[:, None]], 1)
        if self.clock % self.depth_interval == 0:
            state["image"] = self._image(state)
        self._state = state
        return self._observe().set("reward", -tensordict["action"].square().sum(-1, keepdim=True))

    def get_extra_state(self):
        return {**super().get_extra_state(), "clock": self.clock}

    def set_extra_state(self, state):
        self.clock = state["clock"]
        super().set_extra_state({name: value for name, value in state.items() if name != "clock"})


def make_networks(seed=0, dtype=torch.float32, hidden=8):
    """The teacher's policy, as it labels, and a student made from it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        actor = RMAActor(WIDTHS, 2, hidden=(16,), scan_hidden=(8, 4), priv_hidden=(8, 6), estimator_hidden=(8,))
        actor.backbone[-1].weight.data *= 100  # its actions depend on what it is told
        student = DepthStudent(actor, DepthEncoder(9, image=IMAGE, latent=4, hidden=hidden))
    return rma_policy(actor, latent="history").to(dtype), DepthPolicy(student).to(dtype)
