"""FlashSAC's losses against the published update, a transition worked by hand, and the contract of a loss."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import Bounded

from edenrl.modules import FlashCritic, flash_actor, flash_critic, unit_norm_hook
from edenrl.objectives import FlashSACLoss, flashsac
from edenrl.objectives.flashsac import project_distribution, squashed_sample
from edenrl.optim import GradientStep

sys.path.insert(0, str(Path(__file__).parents[1]))
from flashsac_golden import ACTOR_HEAD, CRITIC_HEAD, assert_after, build, load, ours  # noqa: E402

GOLDEN = "flashsac_update"
FORWARD = dict(rtol=1e-4, atol=1e-5)
LOG_PROB = dict(rtol=1e-4, atol=1e-4)
MEAN = dict(rtol=1e-6, atol=1e-7)  # of log-probabilities, whose errors cancel
GRADIENT = dict(rtol=1e-3, atol=1e-5)


@pytest.fixture
def loss(golden):
    config = {name: value.item() for name, value in golden.under("config.").items()}
    net, critic_net = build(golden)
    groups, actions = {"observation": config["obs_dim"]}, config["action_dim"]
    actor = flash_actor(groups, Bounded(-1, 1, (actions,)), hidden_dim=config["actor_hidden_dim"])
    critic = flash_critic(groups, actions, hidden_dim=config["critic_hidden_dim"], num_bins=config["num_bins"])
    actor.module[0].module.load_state_dict(net.state_dict())
    critic.module.load_state_dict(critic_net.state_dict())
    loss = FlashSACLoss(actor, critic, gamma=config["gamma"], tau=config["tau"], target_sigma=config["target_sigma"])
    load(loss.target_critic.module, golden, "target.", CRITIC_HEAD)
    loss.log_alpha.data.copy_(golden["log_temp"])
    return loss


@pytest.fixture
def batch(golden):
    g = golden
    ends = {"observation": g["next_obs"], "reward": g["reward"][:, None], "terminated": g["terminated"][:, None]}
    steps = torch.full((len(g["obs"]), 1), golden["config.n_step"].item())
    data = {"observation": g["obs"], "action": g["action"], "next": ends, "steps_to_next_obs": steps}
    return TensorDict(data, batch_size=[len(g["obs"])])


def noise(monkeypatch, *values):
    queue = list(values)
    monkeypatch.setattr(FlashSACLoss, "_noise", staticmethod(lambda like: queue.pop(0)))


def watch(monkeypatch, owner, name):
    """What a function is given and returns from now on, call by call."""
    calls, original = [], getattr(owner, name)

    def watched(*args, **kwargs):
        calls.append((args, original(*args, **kwargs)))
        return calls[-1][1]

    monkeypatch.setattr(owner, name, watched)
    return calls


def gradients_are(golden, net, prefix, head):
    named, published = dict(net.named_parameters()), golden.under(prefix)
    assert len(published) == len(named)
    for name, value in published.items():
        assert_close(named[ours(name, head)].grad, value, **GRADIENT)


def test_actor_step_is_the_published_one(golden, loss, batch, monkeypatch):
    noise(monkeypatch, golden["noise_actor"])
    critic_before = copy.deepcopy(loss.critic_network.state_dict())
    samples = watch(monkeypatch, flashsac, "squashed_sample")
    out = loss.actor_loss(batch)
    ((_, (action, log_prob)),) = samples
    assert_close(action, golden["actor_step.action"], **FORWARD)
    assert_close(log_prob, golden["actor_step.log_prob"], **LOG_PROB)
    assert_close(out["loss_actor"], golden["actor_step.loss"], **FORWARD)
    assert_close(out["entropy"], golden["actor_step.entropy"], **MEAN)
    assert_close(out["log_prob"], golden["actor_step.log_prob"][: len(batch)], **LOG_PROB)
    assert_close(out["q_value"], golden["actor_step.q"].amin(0).mean(), **FORWARD)
    out["loss_actor"].backward()
    actor = loss.actor_network.module[0].module
    gradients_are(golden, actor, "actor_step.grad.", ACTOR_HEAD)
    assert_after(actor, golden, "actor_step.after.", ACTOR_HEAD)
    assert all(torch.equal(v, critic_before[k]) for k, v in loss.critic_network.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in loss.critic_network.parameters())
    temperature = loss.temperature_loss(batch, out["log_prob"])["loss_temperature"]
    temperature.backward()
    assert_close(torch.tensor(loss.target_entropy), golden["target_entropy"])
    assert_close(temperature, golden["temperature_step.loss"], **MEAN)
    assert_close(loss.log_alpha.grad, golden["temperature_step.grad"], **MEAN)


def test_critic_step_is_the_published_one(golden, loss, batch, monkeypatch):
    noise(monkeypatch, golden["noise_next"])
    actor_before = copy.deepcopy(loss.actor_network.state_dict())
    samples = watch(monkeypatch, flashsac, "squashed_sample")
    logits = watch(monkeypatch, FlashCritic, "logits")
    projections = watch(monkeypatch, flashsac, "project_distribution")
    out = loss.critic_loss(batch)
    ((_, (action, log_prob)),) = samples
    assert_close(action, golden["critic_step.next_action"], **FORWARD)
    assert_close(log_prob, golden["critic_step.next_log_prob"], **LOG_PROB)
    later, now = (found.log_softmax(-1) for _, found in logits)
    value = loss.target_critic.module.value(later)
    assert_close(value.t(), golden["critic_step.next_q"], **FORWARD)
    assert torch.equal(value.argmin(-1), golden["critic_step.min_index"])
    assert_close(now.transpose(0, 1), golden["critic_step.pred_log_prob"], **FORWARD)
    (((probs, places, atoms), target),) = projections
    assert_close(probs.log(), golden["critic_step.selected_log_prob"], **FORWARD)
    assert_close(target, golden["critic_step.target_probs"], **FORWARD)
    runs_on, soft = 1.0 - golden["terminated"].float(), golden["log_temp"].exp() * golden["critic_step.next_log_prob"]
    expected = golden["reward"][:, None] + golden["gamma_n"] * runs_on[:, None] * (atoms - soft[:, None])
    assert_close(places, expected, **FORWARD)
    assert_close(out["loss_critic"], golden["critic_step.loss"], **FORWARD)
    out["loss_critic"].backward()
    gradients_are(golden, loss.critic_network.module, "critic_step.grad.", CRITIC_HEAD)
    assert_after(loss.critic_network.module, golden, "critic_step.after.critic.", CRITIC_HEAD)
    assert_after(loss.target_critic.module, golden, "critic_step.after.target.", CRITIC_HEAD)
    # The actor draws with its running statistics and is left as it is; the target learns by averaging alone.
    assert all(torch.equal(v, actor_before[k]) for k, v in loss.actor_network.state_dict().items())
    frozen = [*loss.actor_network.parameters(), loss.log_alpha, *loss.target_critic.parameters()]
    assert all(p.grad is None for p in frozen)
    target = (golden["critic_step.target_probs"] * loss.target_critic.module.atoms).sum(-1).mean()
    assert_close(out["target_value"], target, **FORWARD)


def test_target_parameters_move_by_polyak_alone(golden, loss):
    before = copy.deepcopy(loss.target_critic.state_dict())
    loss.update_target()
    moved = {ours(name, CRITIC_HEAD): value for name, value in golden.under("polyak.").items()}
    for name, value in loss.target_critic.module.named_parameters():
        assert_close(value.data, moved[name], rtol=1e-5, atol=1e-6)
    for name, value in loss.target_critic.named_buffers():
        assert torch.equal(value, before[name])


def test_whole_update_is_the_published_one(golden, loss, batch, monkeypatch):
    noise(monkeypatch, golden["noise_actor"], golden["noise_next"])
    adam = {
        name: torch.optim.Adam(ps, lr=golden["config.learning_rate"].item())
        for name, ps in loss.parameter_groups().items()
    }
    unit_norm_hook(adam["policy"], loss.actor_network)
    unit_norm_hook(adam["critic"], loss.critic_network)
    out = loss.actor_loss(batch)
    out["loss_actor"].backward()
    adam["policy"].step()
    loss.temperature_loss(batch, out["log_prob"])["loss_temperature"].backward()
    adam["temperature"].step()
    critic = loss.critic_loss(batch)["loss_critic"]
    assert_close(critic, golden["full.critic_loss"], **FORWARD)
    critic.backward()
    adam["critic"].step()
    loss.update_target()
    assert_close(loss.log_alpha.data, golden["full.log_temp"], **FORWARD)
    networks = {
        "full.actor.": (loss.actor_network.module[0].module, ACTOR_HEAD),
        "full.critic.": (loss.critic_network.module, CRITIC_HEAD),
        "full.target.": (loss.target_critic.module, CRITIC_HEAD),
    }
    for prefix, (net, head) in networks.items():
        named = dict(net.named_parameters())
        for name, value in golden.under(prefix).items():
            assert_close(named[ours(name, head)].data, value, **FORWARD)


def test_projection_is_the_published_one(golden):
    low, high, bins = (golden[f"config.{name}"].item() for name in ("min_v", "max_v", "num_bins"))
    atoms = torch.linspace(low, high, bins)
    reward, term = golden["project.reward"][:, None], golden["project.terminated"][:, None].float()
    values = reward + golden["project.gamma_n"] * (1 - term) * (atoms - golden["project.entropy_term"][:, None])
    got = project_distribution(golden["project.log_probs"].exp(), values, atoms)
    assert_close(got, golden["project.target_probs"], rtol=1e-5, atol=1e-6)
    assert_close(got.sum(-1), torch.ones(len(reward)))


def test_density_stays_exact_where_the_tanh_saturates():
    loc, scale, eps = torch.tensor([12.0]), torch.tensor([0.5]), torch.tensor([1.0])
    action, log_prob = squashed_sample(loc, scale, eps)
    # u = 12.5: log N = -1/2 - log(1/2) - log(2 pi) / 2, and 1 - tanh(u)^2 = 4 exp(-2u) to 1e-11.
    by_hand = -0.5 + math.log(2) - 0.5 * math.log(2 * math.pi) - (math.log(4) - 25)
    assert float(action) == 1.0 and abs(float(log_prob) - by_hand) < 1e-4


def targets(reward, terminated, steps, value, gamma=0.9):
    """Mean of the target distribution when the next state is surely worth ``value``, without entropy."""
    actor = flash_actor({"observation": 3}, Bounded(-1, 1, (2,)), hidden_dim=8)
    critic = flash_critic({"observation": 3}, 2, hidden_dim=8, num_bins=201, min_value=-20.0, max_value=20.0)
    loss = FlashSACLoss(actor, critic, gamma=gamma, alpha_init=1e-30)
    with torch.no_grad():
        head = loss.target_critic.module
        head.head.weight.zero_()
        head.head_bias.fill_(-1e4)[:, round((value + 20) / 0.2)] = 0.0
    ends = dict(observation=torch.randn(2, 3), reward=torch.full((2, 1), reward))
    ends["terminated"] = torch.full((2, 1), terminated)
    data = dict(observation=torch.randn(2, 3), action=torch.zeros(2, 2), next=ends)
    data["steps_to_next_obs"] = torch.full((2, 1), steps)
    return float(loss.critic_loss(TensorDict(data, batch_size=[2]))["target_value"])


def test_discount_is_that_of_the_steps_taken():
    # n = 3, rewards 1, gamma 0.9, Q(next) = 10: 1 + 0.9 + 0.81 = 2.71 and 2.71 + 0.729 * 10 = 10.0.
    assert targets(2.71, False, 3, 10.0) == pytest.approx(10.0, abs=1e-3)
    # A time-out after two steps: 1.9 + 0.81 * 10 = 10.0 (9.19 with gamma^3).
    assert targets(1.9, False, 2, 10.0) == pytest.approx(10.0, abs=1e-3)
    assert targets(1.9, True, 2, 10.0) == pytest.approx(1.9, abs=1e-3)


def make(bc_coeff=0.0, **options):
    torch.manual_seed(0)
    actor = flash_actor({"observation": 4}, Bounded(-1, 1, (2,)), hidden_dim=8, num_blocks=1)
    critic = flash_critic({"observation": 4, "extra": 3}, 2, hidden_dim=8, num_blocks=1, num_bins=21)
    return FlashSACLoss(actor, critic, bc_coeff=bc_coeff, **options)


def make_batch(*shape):
    torch.manual_seed(1)
    ends = dict(observation=torch.randn(*shape, 4), extra=torch.randn(*shape, 3), reward=torch.randn(*shape, 1))
    ends["terminated"] = torch.rand(*shape, 1) < 0.3
    data = dict(observation=torch.randn(*shape, 4), extra=torch.randn(*shape, 3), next=ends)
    data["action"] = torch.rand(*shape, 2) * 2 - 1
    data["steps_to_next_obs"] = torch.randint(1, 4, (*shape, 1))
    return TensorDict(data, batch_size=shape)


def test_bc_term_by_hand(monkeypatch):
    loss, batch = make(0.5), make_batch(6)
    monkeypatch.setattr(FlashSACLoss, "_noise", staticmethod(torch.zeros_like))
    out = loss.eval().actor_loss(batch)
    action = loss.actor_network.module[0](batch.clone())["loc"].tanh()
    value = loss.critic_network(batch.clone().set("action", action))["state_action_value"].amin(-1)
    expected = 0.5 * value.abs().mean() * (action - batch["action"]).square().mean()
    assert_close(out["loss_bc"], expected)


def test_eval_mode_moves_no_statistics():
    loss = make().eval()
    before = copy.deepcopy(loss.state_dict())
    loss(make_batch(6))
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_little(loss, batch, monkeypatch, dtype):
    monkeypatch.setattr(FlashSACLoss, "_noise", staticmethod(lambda like: torch.zeros_like(like) + 0.5))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            actor = loss.eval().actor_loss(batch)
            temperature = loss.temperature_loss(batch, actor["log_prob"])
            critic = loss.critic_loss(batch)
        (gradient,) = torch.autograd.grad(temperature["loss_temperature"], loss.log_alpha)
        results.append({**actor, **temperature, **critic, "gradient": gradient})
    single, reduced = results
    assert all(value.dtype == torch.float32 for value in reduced.values())
    error = reduced["log_prob"] - single["log_prob"]
    # bfloat16 has 8 bits: single densities feel it, their mean, which the temperature learns from, does not.
    assert 0 < float(error.abs().mean()) < (0.01 if dtype == torch.float16 else 0.05)
    assert abs(float(error.mean())) < 0.01
    assert abs(float(reduced["gradient"] / single["gradient"]) - 1) < 0.1
    assert_close(reduced["target_value"], single["target_value"], rtol=0.01, atol=0.01)


def test_densities_and_targets_are_not_reduced():
    torch.manual_seed(0)
    loc, scale, noise = torch.randn(64, 3), torch.rand(64, 3) + 0.01, torch.randn(64, 3)
    probs, values, atoms = torch.rand(64, 11).softmax(-1), 3 * torch.randn(64, 11), torch.linspace(-5, 5, 11)
    exact = squashed_sample(loc, scale, noise), project_distribution(probs, values, atoms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduced = squashed_sample(loc, scale, noise), project_distribution(probs, values, atoms)
    assert_close(reduced, exact, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_temperature_is_learned_in_either_precision(dtype):
    """200 updates: it falls while the policy is noisier than wanted, whatever the precision."""
    batch, loss = make_batch(64), make(target_entropy=-20.0, alpha_init=0.1)
    steps = {}
    for part, parameters in loss.parameter_groups().items():
        steps[part] = GradientStep(loss, torch.optim.Adam(parameters, lr=1e-3), amp_dtype=dtype)
    for _ in range(200):
        with steps["policy"].autocast():
            losses = loss.actor_loss(batch)
        steps["temperature"](loss.temperature_loss(batch, losses.pop("log_prob")))
        steps["policy"](losses)
        with steps["critic"].autocast():
            critic = loss.critic_loss(batch)
        steps["critic"](critic)
        loss.update_target()
    # Adam moves a parameter whose gradient is steady by the learning rate: 200 times, in the logarithm.
    assert float(loss.alpha) == pytest.approx(0.1 * math.exp(-0.2), rel=0.03)


def test_other_networks_and_shapes_are_refused():
    loss = make()
    with pytest.raises(ValueError, match="actor from flash_actor"):
        FlashSACLoss(loss.critic_network, loss.critic_network)
    with pytest.raises(ValueError, match="critic from flash_critic"):
        FlashSACLoss(loss.actor_network, loss.actor_network)
    batch = make_batch(6)
    with pytest.raises(ValueError, match=r"shape \(6, 1\), got \(6,\)"):
        loss(batch.set(("next", "reward"), batch["next", "reward"][:, 0]))


@pytest.mark.parametrize("part", ["forward", "actor_loss", "critic_loss"])
@pytest.mark.parametrize("key", ["observation", ("next", "observation"), "action", ("next", "reward")])
def test_data_that_is_not_finite_is_refused_before_the_statistics_move(part, key):
    loss, batch = make(), make_batch(7)
    before = copy.deepcopy(loss.state_dict())
    batch[key][5] = math.nan
    with pytest.raises(ValueError, match="holds nan at row 5"):
        getattr(loss, part)(batch)
    assert all(torch.equal(value, before[name]) for name, value in loss.state_dict().items())


def test_values_that_are_not_finite_become_no_index():
    atoms = torch.linspace(-1.0, 1.0, 5)
    out = project_distribution(torch.full((2, 3), 1 / 3), torch.tensor([[0.0, math.nan, 1.0], [0.1, 0.2, 0.3]]), atoms)
    assert out[0].isnan().any() and out[1].sum().item() == pytest.approx(1.0)
