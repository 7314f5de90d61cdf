import pytest
import torch

from edenrl.objectives import explained_variance


@pytest.mark.parametrize("shape", [(40,), (7, 9), (5, 4, 3)])
@pytest.mark.parametrize("heads", [1, 2])
def test_columns_count_on_their_own(shape, heads):
    generator = torch.Generator().manual_seed(sum(shape))
    offset = torch.tensor([0.0, 100.0])[:heads]
    target = torch.randn(*shape, heads, generator=generator) + offset
    value = target + 0.5 * torch.randn(*shape, heads, generator=generator)
    columns = [
        1 - (target - value)[..., head].var(correction=0) / target[..., head].var(correction=0) for head in range(heads)
    ]
    torch.testing.assert_close(explained_variance(value, target), torch.stack(columns).mean())


def test_targets_that_do_not_vary_leave_nothing_to_explain():
    assert explained_variance(torch.randn(6, 1), torch.ones(6, 1)).item() == 0.0
    assert explained_variance(torch.randn(1, 1), torch.randn(1, 1)).item() == 0.0


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"got \(6,\) and \(6, 1\)"):
        explained_variance(torch.zeros(6), torch.zeros(6, 1))


def test_no_gradient_flows():
    assert not explained_variance(torch.randn(6, 1, requires_grad=True), torch.randn(6, 1)).requires_grad
