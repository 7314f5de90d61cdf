"""SimBaV2 against the published project's numbers, and weights that stay on the sphere however one steps."""

import copy
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import ExplorationType, set_exploration_type

from edenrl.modules import (
    GaussianSimBa,
    GroupEncoder,
    GroupSimBa,
    HyperDense,
    SimBa,
    gaussian_actor,
    observation_groups,
    post_step_hook,
    project_,
    simba_actor,
    simba_critic,
    update_normalization,
)
from edenrl.objectives import PPOLoss
from edenrl.optim import GradientStep, make_optimizer

GROUPS = {"policy": 5, "scan": 7}
SMALL = dict(hidden_dim=16, encoder_hidden=(8,), latent_dim=6)


GOLDEN = "simbav2"


def parameter_names(num_blocks):
    """Names in the reference data by our parameter's name."""
    names = {"embedder.w.weight": "embed.weight", "embedder.scaler.weight": "embed.scaler"}
    for i in range(num_blocks):
        for ours, theirs in (("w1", "w1"), ("scaler", "scaler"), ("w2", "w2"), ("alpha", "alpha")):
            names[f"blocks.{i}.{ours}.weight"] = f"block{i}.{theirs}"
    return names | {
        "head.w1.weight": "head.w1",
        "head.scaler.weight": "head.scaler",
        "head.w2.weight": "head.w2",
        "head.bias": "head.bias",
    }


@pytest.fixture
def reference(golden):
    """A SimBa of the reference data's sizes, and the names of its parameters there."""
    sizes = [int(golden[f"config.{name}"]) for name in ("input_dim", "output_dim", "hidden_dim", "num_blocks")]
    net = SimBa(*sizes, expansion=int(golden["config.expansion"]), c_shift=float(golden["config.c_shift"]))
    names = parameter_names(sizes[-1])
    assert set(names) == {name for name, _ in net.named_parameters()}
    return net, names


def off_sphere(*modules):
    """Largest distance of a row's norm from one."""
    weights = [layer.weight for m in modules for layer in m.modules() if isinstance(layer, HyperDense)]
    assert weights
    return max((weight.detach().double().norm(dim=1) - 1).abs().max().item() for weight in weights)


# Against the published project ---------------------------------------------------------------------------------------


def test_forward_and_gradients_equal_the_published_ones(golden, reference):
    net, names = reference
    net.load_state_dict({ours: golden[f"param.{theirs}"] for ours, theirs in names.items()})
    seen = {}
    for key, part in {"embed": net.embedder, **{f"block{i}": b for i, b in enumerate(net.blocks)}}.items():
        part.register_forward_hook(lambda _, __, out, key=key: seen.update({key: out}))
    x = golden["input"].clone().requires_grad_()
    mean = net(x)
    for key, value in seen.items():
        torch.testing.assert_close(value, golden[f"out.{key}"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mean, golden["out.mean"], rtol=1e-5, atol=1e-6)
    loss = mean.square().sum()
    torch.testing.assert_close(loss, golden["loss"], rtol=1e-5, atol=1e-6)
    loss.backward()
    torch.testing.assert_close(x.grad, golden["grad.input"], rtol=1e-5, atol=1e-5)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad, golden[f"grad.{names[name]}"], rtol=1e-5, atol=1e-5)


def test_start_values_equal_the_published_ones(golden, reference):
    net, names = reference
    vectors = {name: p for name, p in net.named_parameters() if p.ndim == 1}
    assert len(vectors) == 7
    for name, p in vectors.items():
        torch.testing.assert_close(p.detach(), golden[f"init.{names[name]}"].expand_as(p), rtol=1e-5, atol=1e-6)
    assert off_sphere(net) < 1e-6


def test_constants_equal_the_published_ones(golden, reference):
    net, _ = reference
    c = {name: float(value) for name, value in golden.under("config.").items()}
    for scaler, name in ((net.embedder.scaler, "scaler"), (net.head.scaler, "predictor_scaler")):
        assert scaler.weight.tolist() == pytest.approx([c[f"{name}_scale"]] * len(scaler.weight))
        assert scaler.ratio == pytest.approx(c[f"{name}_init"] / c[f"{name}_scale"])
    for block in net.blocks:
        assert block.alpha.weight.tolist() == pytest.approx([c["alpha_scale"]] * len(block.alpha.weight))
        assert block.alpha.ratio == pytest.approx(c["alpha_init"] / c["alpha_scale"])
    # Dead units leave the small constant, and what is shorter than the smallest norm keeps its ratio to it.
    block, unit = net.blocks[0], nn.functional.normalize(torch.ones(int(c["hidden_dim"])), dim=0)
    with torch.no_grad():
        dead = block.w2(torch.full((block.w2.in_features,), c["relu_eps"]))
        block.alpha.weight.fill_(1 / block.alpha.ratio)
        dead = nn.functional.normalize(dead, dim=-1, eps=c["l2_eps"])
        torch.testing.assert_close(block(torch.zeros_like(unit)), dead, rtol=1e-5, atol=1e-6)
        block.alpha.weight.zero_()
        torch.testing.assert_close(block(0.5 * c["l2_eps"] * unit), 0.5 * unit, rtol=1e-5, atol=1e-6)


def test_projection_equals_the_published_one(golden):
    layer = HyperDense(*golden["project.weight"].t().shape)
    for given, expected in [(golden["project.weight"], golden["project.weight_unit"])] + [
        *zip(golden["project.stacked_weight"], golden["project.stacked_weight_unit"], strict=True)
    ]:
        layer.weight.data.copy_(given)
        project_(layer)
        torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_magnitude_of_the_input_is_seen_and_a_zero_input_is_finite():
    net = SimBa(3, 2, hidden_dim=8)
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert (net(x) - net(2 * x)).abs().max() > 1e-3
    assert net(torch.zeros(4, 5, 3)).isfinite().all() and net(torch.zeros(4, 5, 3)).shape == (4, 5, 2)


@pytest.mark.parametrize("wrong", [dict(hidden_dim=0), dict(num_blocks=0), dict(expansion=0), dict(c_shift=0.0)])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
        SimBa(3, 2, **wrong)


# On the sphere, however one steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon"])
@pytest.mark.parametrize("way", ["step", "closure", "scaler", "gradient_step"])
def test_rows_have_unit_norm_after_every_step(name, way):
    net = SimBa(3, 1, hidden_dim=16)
    optimizer = make_optimizer(name, net, lr=0.1)
    net.post_step_hook(optimizer)
    scaler, step = torch.amp.GradScaler("cpu", init_scale=8.0), GradientStep(net, optimizer)
    start = net.blocks[0].w1.weight.detach().clone()

    def loss():
        optimizer.zero_grad()
        return (net(torch.randn(8, 3)) - 1).square().mean()

    def closure():
        value = loss()
        value.backward()
        return value

    for _ in range(5):
        if way == "closure":
            assert optimizer.step(closure).ndim == 0
        elif way == "scaler":
            scaler.scale(loss()).backward()
            scaler.step(optimizer)
            scaler.update()
        elif way == "gradient_step":
            step(TensorDict(loss_mse=loss()))
        else:
            closure()
            optimizer.step()
        assert off_sphere(net) < 1e-6
    assert (net.blocks[0].w1.weight - start).abs().max() > 1e-3


def test_without_the_hook_the_weights_leave_the_sphere():
    net = SimBa(3, 1, hidden_dim=16)
    optimizer = make_optimizer("adam", net, lr=0.1)
    handle = post_step_hook(optimizer, net)
    handle.remove()
    net(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    assert off_sphere(net) > 1e-2
    net.project_()
    assert off_sphere(net) < 1e-6


def test_the_projection_changes_nothing_else():
    net = SimBa(3, 1, hidden_dim=16)
    before = {name: p.detach().clone() for name, p in net.named_parameters() if p.ndim == 1}
    net.project_()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters() if name in before)


def test_a_hook_that_would_project_nothing_is_refused():
    actor, other = simba_actor(GROUPS, 2, **SMALL), gaussian_actor({"policy": 5}, 2)
    with pytest.raises(ValueError, match="Adam trains no HyperDense weight of the 1 given module"):
        post_step_hook(torch.optim.Adam(other.parameters()), actor)


def test_a_checkpoint_keeps_the_rows_on_the_sphere():
    net, other = (SimBa(3, 1, hidden_dim=16) for _ in range(2))
    optimizer = make_optimizer("muon", net, lr=0.1)
    net.post_step_hook(optimizer)
    net(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert off_sphere(other) < 1e-6
    assert torch.equal(other(torch.ones(2, 3)), net(torch.ones(2, 3)))


WORKER = """
import json, sys
import torch
import torch.distributed as dist
from edenrl.modules import HyperDense, SimBa
from edenrl.optim import make_optimizer
dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
net = SimBa(3, 1, hidden_dim=16)
optimizer = make_optimizer("muon", net, lr=0.1)
net.post_step_hook(optimizer)
torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    optimizer.zero_grad()
    (net(torch.randn(8, 3)) - 1).square().mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= 2
    optimizer.step()
flat = torch.cat([p.detach().flatten() for p in net.parameters()])
other = [torch.empty_like(flat) for _ in range(2)]
dist.all_gather(other, flat)
rows = [(m.weight.norm(dim=1) - 1).abs().max() for m in net.modules() if isinstance(m, HyperDense)]
if dist.get_rank() == 0:
    print(json.dumps({"off": float(max(rows)), "apart": float((other[0] - other[1]).abs().max())}))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_stay_on_the_sphere_and_together(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*command, "worker.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert result["off"] < 1e-6 and result["apart"] == 0.0


# Observation groups --------------------------------------------------------------------------------------------------


def test_each_group_has_an_encoder_of_its_own_widths():
    encoder = GroupEncoder({"policy": 45, "scan": 132, "map": 9}, {"scan": (64, 32), "map": ()}, latent_dim=16)
    shapes = {
        name: [tuple(layer.weight.shape) for layer in mlp if isinstance(layer, nn.Linear)]
        for name, mlp in encoder.encoders.items()
    }
    assert shapes == {"policy": [(256, 45), (16, 256)], "scan": [(64, 132), (32, 64), (16, 32)], "map": [(16, 9)]}
    out = encoder(torch.zeros(2, 45), torch.ones(2, 132), torch.zeros(2, 9))
    assert out.shape == (2, 48) and encoder.out_features == 48
    assert (out[:, 16:32] != 0).all() and (out[:, :16] == 0).all()


def test_the_default_encoder_is_the_specified_one():
    encoder = GroupEncoder({"policy": 45})
    layers = list(encoder.encoders["policy"])
    assert [type(layer) for layer in layers] == [nn.Linear, nn.SiLU, nn.Linear]
    assert [tuple(layer.weight.shape) for layer in layers[::2]] == [(256, 45), (128, 256)]


def test_groups_reach_their_encoders_in_the_order_asked_also_behind_the_normalization():
    net = GroupSimBa({"b": 1, "a": 2}, 1, **SMALL)
    net.update_normalization(torch.tensor([[10.0], [30.0]]), torch.tensor([[0.0, 1.0], [4.0, 5.0]]))
    seen = {}
    for name, mlp in net.encoder.encoders.items():
        mlp.register_forward_hook(lambda _, given, __, name=name: seen.update({name: given[0]}))
    net(torch.tensor([[30.0]]), torch.tensor([[4.0, 3.0]]))
    # (30 - 20) / 10, (4 - 2) / 2 and (3 - 3) / 2, each denominator plus eps 0.01
    torch.testing.assert_close(seen["b"], torch.tensor([[10 / 10.01]]))
    torch.testing.assert_close(seen["a"], torch.tensor([[2 / 2.01, 0.0]]))


def test_encoder_widths_for_an_unknown_group_list_the_groups():
    with pytest.raises(ValueError, match=r"given for \['scam'\]; the groups are {'policy': 5, 'scan': 7}"):
        simba_actor(GROUPS, 2, encoder_hidden={"scam": (8,)})


def test_a_group_the_environment_lacks_is_an_error_that_lists_the_groups():
    spec = Composite(policy=Unbounded((4, 5)), scan=Unbounded((4, 7)), shape=(4,))
    with pytest.raises(
        ValueError, match=r"'scam' does not exist. Groups of this environment: {'policy': 5, 'scan': 7}"
    ):
        simba_actor(observation_groups(spec, ["policy", "scam"]), 2)
    with pytest.raises(KeyError, match="scan"):
        simba_actor(GROUPS, 2, **SMALL)(TensorDict(policy=torch.zeros(4, 5), batch_size=[4]))


# Actor and critic ----------------------------------------------------------------------------------------------------


def test_actor_and_critic_are_the_specified_sizes():
    actor, critic = simba_actor(GROUPS, 3), simba_critic(GROUPS, 2)
    net = actor.module[0].module
    assert (len(net.trunk.blocks), len(critic.module.trunk.blocks)) == (1, 2)
    assert net.trunk.blocks[0].w1.weight.shape == (2048, 512) and net.trunk.embedder.w.weight.shape == (512, 257)
    td = critic(actor(TensorDict(policy=torch.randn(6, 4, 5), scan=torch.randn(6, 4, 7), batch_size=[6, 4])))
    assert td["action"].shape == (6, 4, 3) and td["state_value"].shape == (6, 4, 2)
    torch.testing.assert_close(td["scale"], torch.ones(6, 4, 3))


def test_the_actor_refuses_what_gaussian_actor_refuses():
    with pytest.raises(ValueError, match="discrete action space"):
        simba_actor(GROUPS, Categorical(3))
    with pytest.raises(ValueError, match="finite action bounds"):
        simba_actor(GROUPS, Unbounded((3,)), squash=True, **SMALL)
    actor = simba_actor(GROUPS, Bounded(-2.0, 2.0, (3,)), squash=True, init_std=5.0, **SMALL)
    with set_exploration_type(ExplorationType.RANDOM):
        td = actor(TensorDict(policy=torch.randn(64, 5), scan=torch.randn(64, 7), batch_size=[64]))
    assert 1.5 < td["action"].abs().max() <= 2.0


def test_running_normalization_of_both_networks_is_fed_by_the_rollout():
    networks = nn.ModuleList([simba_actor(GROUPS, 2, **SMALL), simba_critic(GROUPS, **SMALL)])
    data = TensorDict(policy=torch.full((6, 4, 5), 3.0), scan=torch.randn(6, 4, 7), batch_size=[6, 4])
    update_normalization(networks, data)
    norms = [networks[0].module[0].module.norm, networks[1].module.norm]
    assert [int(norm.count) for norm in norms] == [24, 24]
    assert all(torch.equal(norm.mean[:5], torch.full((5,), 3.0)) for norm in norms)
    update_normalization(simba_critic(GROUPS, normalize=False, **SMALL), data)


@pytest.mark.parametrize("functional", [False, True])
def test_ppo_trains_both_and_they_stay_on_the_sphere(functional):
    actor, critic = simba_actor(GROUPS, 2, **SMALL), simba_critic(GROUPS, **SMALL)
    loss = PPOLoss(actor, critic, functional=functional, clip_value=False)
    optimizer = make_optimizer("muon", [actor, critic], lr=0.01)
    post_step_hook(optimizer, actor, critic)
    step = GradientStep(loss, optimizer, max_grad_norm=1.0)
    batch = TensorDict(policy=torch.randn(64, 5), scan=torch.randn(64, 7), batch_size=[64])
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        critic(actor(batch))
    batch["advantage"] = batch["action"].sum(-1, keepdim=True)
    batch["value_target"] = batch["policy"][..., :1]
    values = [{**losses, **step(losses)} for losses in (loss(batch) for _ in range(30))]
    assert values[-1]["loss_critic"] < 0.8 * values[0]["loss_critic"]
    assert values[-1]["loss_objective"] < values[0]["loss_objective"] - 0.05
    assert off_sphere(actor, critic) < 1e-6


# Compilation and export ----------------------------------------------------------------------------------------------


def pair(**options):
    """The same Gaussian network plain and compiled, and an input."""
    nets = []
    for compiled in ({}, options):
        torch.manual_seed(0)
        nets.append(GaussianSimBa(GROUPS, 2, num_blocks=1, **SMALL, **compiled))
    return *nets, (torch.randn(6, 5), torch.randn(6, 7))


def exports(net, groups):
    """What three ways of export compute."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    net = net.eval()
    yield torch.export.export(net, groups).module()(*groups)
    yield torch.jit.trace(net, groups)(*groups)
    file = io.BytesIO()
    torch.onnx.export(net, groups, file, dynamo=False, input_names=["policy", "scan"])
    given = {name: x.numpy() for name, x in zip(("policy", "scan"), groups, strict=True)}
    yield [torch.from_numpy(out) for out in ReferenceEvaluator(onnx.load_from_string(file.getvalue())).run(None, given)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param(True, marks=pytest.mark.slow)])
def test_compilation_changes_neither_numbers_nor_keys_nor_exports(backend, tmp_path):
    plain, compiled, groups = pair(compile=backend)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    for _ in range(2):  # the second pass after a change of the weights
        expected, given = plain(*groups), compiled(*groups)
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)
        for net, out in ((plain, expected), (compiled, given)):
            net.zero_grad()
            out[0].square().sum().backward()
        for p, q in zip(plain.parameters(), compiled.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)
                p.data += 0.1 * p.grad
        project_(plain)
        compiled.load_state_dict(plain.state_dict())
    expected = [out.detach() for out in plain(*groups)]
    torch.testing.assert_close([out.detach() for out in compiled(*groups)], expected, rtol=0, atol=1e-5)
    for net in (plain, compiled):
        for exported in exports(net, groups):
            torch.testing.assert_close([out.detach() for out in exported], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(compiled)(*groups), plain(*groups), rtol=0, atol=1e-5)


@pytest.mark.parametrize("functional", [False, True])
def test_a_compiled_actor_trains_like_the_plain_one(functional):
    def train(**options):
        torch.manual_seed(0)
        actor, critic = simba_actor(GROUPS, 2, **SMALL, **options), simba_critic(GROUPS, **SMALL, **options)
        loss = PPOLoss(actor, critic, functional=functional)
        optimizer = make_optimizer("adam", [*actor.parameters(), *critic.parameters()], lr=0.01)
        post_step_hook(optimizer, actor, critic)
        batch = TensorDict(policy=torch.randn(32, 5), scan=torch.randn(32, 7), batch_size=[32])
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            critic(actor(batch))
        batch["advantage"], batch["value_target"] = torch.randn(32, 1), torch.randn(32, 1)
        step = GradientStep(loss, optimizer)
        return torch.stack([step(loss(batch))["loss"] for _ in range(5)])

    torch.testing.assert_close(train(compile="aot_eager"), train(), rtol=0, atol=1e-4)


# The page ------------------------------------------------------------------------------------------------------------


def test_the_ten_lines_of_the_page_run():
    page = (Path(__file__).parents[2] / "docs" / "pages" / "algorithms" / "simba.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in blocks[0].splitlines() if line.strip() and not re.match(r"import|from", line)]
    assert "simba_actor(" in blocks[0] and len(lines) <= 10
    names = {}
    for block in blocks:
        exec(compile(block, "simba.md", "exec"), names)
    assert off_sphere(names["actor"]) < 1e-6


def test_loaded_weights_are_projected_and_unit_rows_keep_their_bits():
    torch.manual_seed(5)
    net, other = SimBa(7, 3, hidden_dim=24), SimBa(7, 3, hidden_dim=24)
    post_step_hook(optimizer := torch.optim.Adam(net.parameters(), lr=0.1), net)
    net(torch.randn(50, 7)).square().mean().backward()
    optimizer.step()
    state = net.state_dict()
    other.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    scaled = {name: 3 * value if name.endswith(("w.weight", "w1.weight")) else value for name, value in state.items()}
    scaled["head.w2.weight"] = state["head.w2.weight"].clone()
    scaled["head.w2.weight"][1] *= 2
    other.load_state_dict(scaled)
    for layer in other.modules():
        if isinstance(layer, HyperDense):
            torch.testing.assert_close(layer.weight.norm(dim=1), torch.ones(len(layer.weight)))
    assert torch.equal(other.head.w2.weight[[0, 2]], state["head.w2.weight"][[0, 2]])
    copy.deepcopy(other).load_state_dict(scaled)
