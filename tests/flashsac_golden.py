"""FlashSAC's networks with the published parameters, for the tests of the networks and of the losses."""

from torch.testing import assert_close

from edenrl.modules import FlashActor, FlashCritic

LAYER = dict(rtol=1e-5, atol=2e-6)


def ours(name, head):
    """Our name of a published parameter or statistic."""
    if name in head:
        return head[name]
    block, _, rest = name.partition(".")
    at = f"trunk.blocks.{block.removeprefix('block')}." if block.startswith("block") else "trunk."
    return at + {
        "weight": "weight.weight",
        "rms_scale": "post.scale",
        "w1": "w1.weight",
        "w2": "w2.weight",
    }.get(rest, rest)


ACTOR_HEAD = {
    "head.mean_weight": "mean.weight",
    "head.std_weight": "std.weight",
    "head.mean_bias": "mean_bias",
    "head.std_bias": "std_bias",
}
CRITIC_HEAD = {"head.weight": "head.weight", "head.bias": "head_bias"}


def load(net, golden, prefix, head):
    state = {ours(name, head): value for name, value in golden.under(prefix).items()}
    atoms = {"atoms": net.atoms} if isinstance(net, FlashCritic) else {}
    net.load_state_dict({**state, **atoms})
    return net


def build(golden, prefix="", critic_prefix="critic."):
    c = {name: value.item() for name, value in golden.under("config.").items()}
    actor = FlashActor(
        {"observation": c["obs_dim"]},
        c["action_dim"],
        hidden_dim=c["actor_hidden_dim"],
        num_blocks=c["actor_num_blocks"],
        expansion=c["expansion"],
    )
    critic = FlashCritic(
        c["obs_dim"] + c["action_dim"],
        hidden_dim=c["critic_hidden_dim"],
        num_blocks=c["critic_num_blocks"],
        num_members=c["num_qs"],
        num_bins=c["num_bins"],
        min_value=c["min_v"],
        max_value=c["max_v"],
        expansion=c["expansion"],
    )
    return load(actor, golden, f"{prefix}actor.", ACTOR_HEAD), load(critic, golden, critic_prefix, CRITIC_HEAD)


def assert_after(net, golden, prefix, head):
    """Running statistics are the published ones after that pass."""
    state, published = net.state_dict(), golden.under(prefix)
    assert len(published) >= 6
    for name, value in published.items():
        assert_close(state[ours(name, head)], value, **LAYER)
