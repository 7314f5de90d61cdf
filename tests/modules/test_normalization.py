import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded

from edenrl.modules import (
    Discriminator,
    FlashActor,
    FlashCritic,
    FrameNorm,
    HIMActor,
    HIMLayout,
    RMAActor,
    RunningNorm,
    SimBa,
    UnitBatchNorm,
    flash_actor,
    flash_critic,
    gaussian_actor,
    value_critic,
)
from edenrl.modules.normalization import root
from edenrl.objectives import FlashSACLoss


def test_merged_batches_equal_one_pass_statistics():
    torch.manual_seed(0)
    data = torch.randn(700, 5) * torch.tensor([1.0, 10, 0.1, 3, 1]) + torch.tensor([0.0, 100, -5, 1, 1e3])
    norm = RunningNorm(5)
    for part in data.split([1, 9, 90, 600]):
        norm.update(part)
    assert int(norm.count) == 700
    torch.testing.assert_close(norm.mean.double(), data.double().mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.var.double(), data.double().var(0, unbiased=False), rtol=1e-4, atol=1e-5)


def test_between_batch_term_by_hand():
    norm = RunningNorm(1)
    norm.update(torch.tensor([[0.0], [2.0]]))
    norm.update(torch.tensor([[10.0], [12.0]]))
    # mean 6; deviations -6, -4, 4, 6: variance (36 + 16 + 16 + 36) / 4 = 26
    assert (norm.mean.item(), norm.var.item(), int(norm.count)) == (6.0, 26.0, 4)
    assert norm(torch.tensor([6.0 + 26**0.5])).item() == pytest.approx(26**0.5 / (26**0.5 + 1e-2))


def test_any_batch_shape():
    norm = RunningNorm((2, 3))
    norm.update(torch.randn(4, 5, 2, 3))
    assert int(norm.count) == 20 and norm(torch.randn(7, 2, 3)).shape == (7, 2, 3)


def test_eval_mode_freezes_to_the_bit():
    norm = RunningNorm(3)
    norm.update(torch.randn(16, 3))
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    norm.eval()
    norm.update(torch.full((8, 3), 100.0))
    norm(torch.full((8, 3), 100.0))
    norm.train()
    norm(torch.full((8, 3), 100.0))
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())


def test_masked_features_pass_through():
    norm = RunningNorm(3, mask=torch.tensor([True, False, True]))
    norm.update(torch.randn(64, 3) * 50)
    x = torch.randn(4, 3)
    assert torch.equal(norm(x)[:, 1], x[:, 1]) and not torch.equal(norm(x)[:, 0], x[:, 0])


@pytest.mark.parametrize("rows", [torch.zeros(1, 2), torch.full((5, 2), 7.0)])
def test_zero_variance_and_single_rows_stay_finite(rows):
    norm = RunningNorm(2, clip=10.0)
    norm.update(rows)
    out = norm(rows + torch.tensor([0.0, 1e6]))
    assert out.isfinite().all() and out.abs().max() <= 10.0


def test_empty_batch_changes_nothing():
    norm = RunningNorm(2)
    norm.update(torch.zeros(0, 2))
    assert int(norm.count) == 0 and norm.var.tolist() == [1.0, 1.0]


def test_nonfinite_input_is_refused_and_named():
    norm = RunningNorm(2)
    bad = torch.zeros(4, 2)
    bad[2, 1] = float("nan")
    with pytest.raises(ValueError, match=r"1 value\(s\), the first in row 2, feature \[1\]"):
        norm.update(bad)
    assert int(norm.count) == 0


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"features of shape \(4, 3\)"):
        RunningNorm(2).update(torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"bool mask of shape \(2,\)"):
        RunningNorm(2, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="clip > 0"):
        RunningNorm(2, clip=0.0)


def test_state_travels_with_state_dict_and_double():
    norm = RunningNorm(2)
    norm.update(torch.randn(32, 2))
    fresh = RunningNorm(2)
    fresh.load_state_dict(norm.state_dict())
    x = torch.randn(3, 2)
    assert torch.equal(fresh(x), norm(x))
    assert norm.double()(x.double()).dtype == torch.float64


def test_statistics_still_move_after_a_hundred_million_samples():
    norm = RunningNorm(1)
    norm.update(torch.tensor([[0.0], [2.0]]))  # mean 1, variance 1
    norm.count.fill_(100_000_000)
    for _ in range(1000):
        norm.update(torch.full((1000, 1), 2.0))
    # One per cent of twos joins: the mean is (1e8 * 1 + 1e6 * 2) / 1.01e8.
    mean = (1e8 + 2e6) / 1.01e8
    assert norm.mean.item() == pytest.approx(mean, abs=1e-9)
    # E[x^2] = (1e8 * 2 + 1e6 * 4) / 1.01e8
    assert norm.var.item() == pytest.approx((2e8 + 4e6) / 1.01e8 - mean**2, abs=1e-9)


def test_a_cast_changes_the_output_and_not_the_statistics():
    norm = RunningNorm(2, clip=5.0)
    norm.update(torch.tensor([[0.1, 1e6], [0.3, 1e6 + 0.1]], dtype=torch.float64))
    exact = norm.mean.clone()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        norm.to(dtype)
        assert torch.equal(norm.mean, exact) and norm.var.dtype == torch.float64
        assert norm(torch.zeros(3, 2, dtype=dtype)).dtype == dtype
    assert RunningNorm(2)(torch.zeros(1, 2, dtype=torch.bfloat16)).dtype == torch.float32  # as under autocast
    assert RunningNorm(2)(torch.zeros(1, 2, dtype=torch.int64)).dtype == torch.float32


def test_a_checkpoint_with_float32_statistics_loads():
    norm = RunningNorm(2)
    state = {"mean": torch.tensor([1.5, 2.5]), "var": torch.tensor([4.0, 9.0]), "count": torch.tensor(7)}
    norm.load_state_dict(state)
    assert norm.mean.dtype == torch.float64 and norm.mean.tolist() == [1.5, 2.5] and int(norm.count) == 7
    assert norm(torch.tensor([3.5, 2.5])).tolist() == [pytest.approx(2 / 2.01), 0.0]


def test_the_exported_program_takes_and_gives_float32():
    norm = RunningNorm(3)
    norm.update(torch.randn(50, 3) * 4 + 7)
    x = torch.randn(5, 3)
    program = torch.export.export(norm.eval(), (x,)).module()
    assert program(x).dtype == torch.float32 and torch.equal(program(x), norm(x))


@pytest.mark.parametrize("kind", [RunningNorm, FrameNorm])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize("spread", [3.0, 270.0, 6e4])
def test_wide_features_are_seen_in_every_precision(kind, dtype, close, spread):
    norm = kind(1)
    for _ in range(60):
        norm.update(torch.tensor([[-spread], [spread]]))
    x = torch.tensor([[0.5 * spread], [spread]])
    out = norm.to(dtype)(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), torch.tensor([[0.5], [1.0]]), rtol=close + 0.01 / spread, atol=0)


def test_a_variance_beyond_float32_still_has_a_root():
    norm = RunningNorm(1)
    norm.update(torch.tensor([[-1e20], [1e20]]))
    assert norm(torch.tensor([[1e20]])).item() == pytest.approx(1.0)


def test_the_root_has_the_digits_of_the_plain_one():
    var = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 10 ** torch.arange(
        -7.0, 9.0, 0.016, dtype=torch.float64
    )
    assert torch.equal(root(var, torch.float32), var.float().sqrt())
    assert torch.equal(root(var, torch.float32, 1e-4), (var.float() + 1e-4).sqrt())


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def narrow(*shape):
    return torch.randn(*shape, dtype=torch.float32)


@pytest.mark.parametrize(
    "run",
    [
        lambda: gaussian_actor({"a": 3}, 2, normalize=False).module[0].module(narrow(4, 3))[0],
        lambda: gaussian_actor({"a": 3}, 2).module[0].module(narrow(4, 3))[0],
        lambda: value_critic({"a": 3}, normalize=False).module(narrow(4, 3)),
        lambda: FlashActor({"a": 3}, 2, hidden_dim=8)(narrow(4, 3), batch_stats=True)[0],
        lambda: FlashCritic(5, hidden_dim=8)(narrow(4, 3), narrow(4, 2), batch_stats=True)[0],
        lambda: SimBa(3, 2, hidden_dim=8)(narrow(4, 3)),
        lambda: HIMActor(HIMLayout(frame=4, frames=3, order="oldest_first"), 2, target_skip_dim=0)(narrow(4, 12))[0],
        lambda: RMAActor(dict(prop=6, priv_explicit=3, priv_latent=5, history=60), 4)(
            narrow(4, 6), history=narrow(4, 60), latent="history", estimated=True
        )[0],
        lambda: Discriminator(3, hidden=(8,), normalize=False)(narrow(4, 15)),
    ],
)
def test_networks_of_a_float64_program_read_what_environments_publish(run, double):
    out = run()
    assert out.dtype == torch.float64 and out.isfinite().all()


def test_the_losses_of_flashsac_run_in_a_float64_program(double):
    actor = flash_actor({"a": 3}, Bounded(-1.0, 1.0, (2,), dtype=torch.float32), hidden_dim=8)
    loss = FlashSACLoss(actor, flash_critic({"a": 3}, 2, hidden_dim=8))
    ends = dict(a=narrow(9, 3), reward=narrow(9, 1), terminated=torch.zeros(9, 1, dtype=torch.bool))
    out = loss(TensorDict(a=narrow(9, 3), action=narrow(9, 2).tanh(), next=ends, batch_size=[9]))
    assert all(value.dtype == torch.float64 and value.isfinite() for value in out.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_statistics_of_wide_features_survive_half_precision(dtype):
    norm = UnitBatchNorm(2)
    norm.running_var.fill_(9e4)
    out = norm.to(dtype)(torch.tensor([[300.0, -600.0]], dtype=dtype))
    assert out.dtype == dtype and norm.running_var.dtype == torch.float32
    torch.testing.assert_close(out.float(), torch.tensor([[1.0, -2.0]]), rtol=2e-2, atol=0)
