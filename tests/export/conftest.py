"""Policies of every kind with weights and statistics that matter, and their exports."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import EnvBase, InitTracker
from torchrl.modules import GRUModule, IndependentNormal, LSTMModule, ProbabilisticActor

from edenrl.envs import PointMass, make_env, wrap_env
from edenrl.export import export_policy
from edenrl.modules import GaussianMLP, GroupMLP, RunningNorm, make_actor, observation_groups, simba_actor

KINDS = ("mlp", "squash", "discrete", "simba", "gru", "lstm")


def as_trained(policy: nn.Module) -> nn.Module:
    """Weights far from their initialization, statistics of data around 5 with a spread of 3."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
        for part in policy.modules():
            if isinstance(part, RunningNorm):
                part.mean.fill_(5.0).add_(0.1 * torch.randn(part.mean.shape, generator=generator))
                part.var.fill_(9.0)
    return policy


def recurrent_actor(cls: type, python_based: bool = False) -> TensorDictSequential:
    """Normalizing encoder, two recurrent layers of 16, Gaussian head; reads and writes what TorchRL's modules do."""
    state = ["h", "c"] if cls is LSTMModule else ["h"]
    rnn = cls(
        input_size=12,
        hidden_size=16,
        num_layers=2,
        dropout=0.1,
        python_based=python_based,
        in_keys=["embedding", *state],
        out_keys=["memory", *(("next", key) for key in state)],
    )
    head = ProbabilisticActor(
        TensorDictModule(
            GaussianMLP(16, 2, hidden=(8,), normalize=False), in_keys=["memory"], out_keys=["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )
    encoder = TensorDictModule(GroupMLP(14, 12, hidden=(16,)), in_keys=["observation"], out_keys=["embedding"])
    return TensorDictSequential(encoder, rnn, head)


def build(kind: str, rows: int = 3) -> tuple[nn.Module, Callable[..., EnvBase]]:
    """A policy and a function that makes its environment."""
    name = "CartPole-v1" if kind == "discrete" else "PointMass"
    mode = "squash" if kind == "squash" else "clip"

    def make(rows: int = rows, **kwargs: object) -> EnvBase:
        return wrap_env(make_env(name, rows, seed=0, **kwargs), action_mode=mode)

    if kind in ("gru", "lstm"):
        return as_trained(recurrent_actor(GRUModule if kind == "gru" else LSTMModule)), make
    env = make().base_env
    groups = observation_groups(env.observation_spec)
    if kind == "simba":
        return as_trained(simba_actor(groups, env.action_spec_unbatched, hidden_dim=32, latent_dim=16)), make
    actor = make_actor(groups, env.action_spec_unbatched, hidden=(32, 32), squash=kind == "squash")
    return as_trained(actor), make


@dataclass
class Exported:
    policy: nn.Module
    make: Callable[..., EnvBase]
    folder: Path
    files: dict[str, Path]

    def playing(self, rows: int) -> tuple[EnvBase, nn.Module]:
        """The environment as a recurrent policy needs it, and the policy in evaluation mode."""
        env = self.make(rows)
        for part in self.policy.modules():
            if isinstance(part, GRUModule | LSTMModule):
                env = env.append_transform(InitTracker()).append_transform(part.make_tensordict_primer())
        return env, self.policy.eval()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    """Every kind of policy, exported in every format."""
    out = {}
    for kind in KINDS:
        torch.manual_seed(3)
        policy, make = build(kind)
        folder = tmp_path_factory.mktemp(kind)
        files = export_policy(policy, make(), folder, formats=("onnx", "jit", "pt2"), task=f"test-{kind}")
        out[kind] = Exported(policy, make, folder, files)
    return out


@pytest.fixture
def point_mass() -> EnvBase:
    return wrap_env(PointMass(3, seed=0))


# With --import-mode=importlib a conftest cannot be imported: its functions reach the tests as fixtures.
for function in (as_trained, build, recurrent_actor):
    globals()[f"{function.__name__}_fixture"] = pytest.fixture(name=function.__name__)(lambda f=function: f)
