import pytest
import torch
from tensordict import TensorDict

from edenrl.training import minibatches


def numbered(*batch):
    count = torch.tensor(batch).prod().item()
    return TensorDict(number=torch.arange(count).reshape(*batch, 1), batch_size=batch)


@pytest.mark.parametrize(("batch", "parts"), [((12,), 3), ((3, 5), 4), ((2, 3, 4), 24), ((7,), 1)])
def test_every_epoch_sees_each_transition_once(batch, parts):
    found = list(minibatches(numbered(*batch), 2, parts))
    assert len(found) == 2 * parts
    epochs = [torch.cat([b["number"] for b in found[i * parts : (i + 1) * parts]]).flatten() for i in range(2)]
    everything = torch.arange(torch.tensor(batch).prod().item())
    assert all(torch.equal(epoch.sort().values, everything) for epoch in epochs)
    sizes = {len(b) for b in found}
    assert max(sizes) - min(sizes) <= 1
    if parts > 1:
        assert not torch.equal(epochs[0], epochs[1])


def test_the_order_comes_from_torchs_generator():
    torch.manual_seed(3)
    first = [b["number"] for b in minibatches(numbered(20), 1, 4)]
    torch.manual_seed(3)
    order = torch.randperm(20)
    assert torch.equal(torch.cat(first).flatten(), order)


def test_more_parts_than_transitions_are_refused():
    with pytest.raises(ValueError, match="num_minibatches=5 were asked of 4 transitions"):
        next(minibatches(numbered(4), 1, 5))
