"""The RMA actor against published numbers, its compositions, and widths that do not fit."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from edenrl.modules import RMA_CHUNKS, HistoryEncoder, RMAActor, rma_composition, rma_policy

CLOSE = dict(atol=1e-5, rtol=1e-5)
WIDTHS = dict(prop=6, scan=11, priv_explicit=3, priv_latent=5, history=60)


GOLDEN = "rma"


def copy_layers(module, golden, names):
    """Copies weights of the reference data into a module's layers with weights, in order."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv1d)]
    for layer, name in zip(layers, names, strict=True):
        layer.load_state_dict({part: golden[f"{name}_{part}"] for part in ("weight", "bias")})


def history_layers(prefix, golden):
    convolutions = range(len(golden[f"{prefix}_strides"]))
    return [f"{prefix}_proj", *(f"{prefix}_conv{i}" for i in convolutions), f"{prefix}_out"]


def reference_actor(golden):
    """An actor of the reference data's sizes and weights."""
    sizes = {name: int(golden[f"cfg_num_{name}"]) for name in ("prop", "scan", "priv_explicit", "priv_latent")}
    widths = {**sizes, "history": int(golden["cfg_num_hist"]) * sizes["prop"]}
    dims = {
        ours: golden[f"cfg_{theirs}"].tolist()
        for ours, theirs in dict(
            hidden="hidden_dims",
            scan_hidden="scan_encoder_dims",
            priv_hidden="priv_encoder_dims",
            estimator_hidden="estimator_hidden_dims",
        ).items()
    }
    actor = RMAActor(widths, int(golden["cfg_num_actions"]), **dims)
    for part, name in (("scan_encoder", "scan_encoder"), ("priv_encoder", "priv_encoder")):
        copy_layers(getattr(actor, part), golden, [f"{name}{i}" for i in range(len(golden[f"cfg_{name}_dims"]))])
    copy_layers(actor.backbone, golden, ["backbone0", "backbone1", "backbone2"])
    copy_layers(actor.estimator, golden, ["estimator0", "estimator1", "estimator2"])
    copy_layers(actor.history_encoder, golden, history_layers("hist_encoder", golden))
    return actor


def chunks_of(flat, widths):
    return dict(zip(RMA_CHUNKS, flat.split([widths[name] for name in RMA_CHUNKS], -1), strict=True))


def test_latents_and_estimate_equal_the_published_ones(golden):
    actor = reference_actor(golden)
    chunks = chunks_of(golden["obs"], actor.widths)
    torch.testing.assert_close(actor.scan_encoder(chunks["scan"]), golden["scan_latent"], **CLOSE)
    torch.testing.assert_close(
        actor.encode("privileged", priv_latent=chunks["priv_latent"]), golden["priv_latent"], **CLOSE
    )
    history = actor.encode("history", history=chunks["history"])
    torch.testing.assert_close(history, golden["hist_latent"], **CLOSE)
    torch.testing.assert_close(actor.estimator(chunks["prop"]), golden["estimate"], **CLOSE)


@pytest.mark.parametrize(
    ("expected", "options"),
    [
        ("mean_priv", {}),
        ("mean_hist", dict(latent="history")),
        ("mean_estimated_priv", dict(estimated=True)),
        ("mean_estimated_hist", dict(latent="history", estimated=True)),
    ],
)
def test_means_of_all_compositions_equal_the_published_ones(golden, expected, options):
    actor = reference_actor(golden)
    chunks = chunks_of(golden["obs"], actor.widths)
    loc, scale = actor(**chunks, **options)
    torch.testing.assert_close(loc, golden[expected], **CLOSE)
    torch.testing.assert_close(scale, torch.ones_like(loc))
    flat = rma_policy(actor, "policy", **options)
    torch.testing.assert_close(
        flat(TensorDict(policy=golden["obs"], batch_size=[len(golden["obs"])]))["loc"], golden[expected], **CLOSE
    )
    separate = rma_policy(actor, {"history": "past"}, **options)
    read = {"past" if name == "history" else name: chunk for name, chunk in chunks.items()}
    td = TensorDict({name: read[name] for name in separate.in_keys}, batch_size=[len(golden["obs"])])
    torch.testing.assert_close(separate(td)["loc"], golden[expected], **CLOSE)


def test_estimates_take_the_place_of_the_true_entries(golden):
    actor = reference_actor(golden)
    estimated, prop = golden["obs_estimated"], golden["obs"][:, : actor.widths["prop"]]
    torch.testing.assert_close(chunks_of(estimated, actor.widths)["priv_explicit"], actor.estimator(prop), **CLOSE)
    for expected, latent in (("mean_estimated_priv", "privileged"), ("mean_estimated_hist", "history")):
        loc, _ = actor(**chunks_of(estimated, actor.widths), latent=latent)
        torch.testing.assert_close(loc, golden[expected], **CLOSE)


def test_a_scan_latent_from_elsewhere(golden):
    actor = reference_actor(golden)
    chunks = chunks_of(golden["obs"], actor.widths)
    del chunks["scan"]
    loc, _ = actor(**chunks, latent="history", scan_latent=golden["replacement_scan_latent"])
    torch.testing.assert_close(loc, golden["mean_hist_replaced_scan"], **CLOSE)


@pytest.mark.parametrize("frames", [20, 50])
def test_history_encoders_of_other_lengths_equal_the_published_ones(golden, frames):
    encoder = HistoryEncoder(golden[f"hist{frames}_input"].shape[-1], frames, golden[f"hist{frames}_latent"].shape[-1])
    copy_layers(encoder, golden, history_layers(f"hist{frames}_encoder", golden))
    history = golden[f"hist{frames}_input"]
    torch.testing.assert_close(encoder(history.flatten(1)), golden[f"hist{frames}_latent"], **CLOSE)


@pytest.mark.parametrize(("name", "kind"), [("relu", nn.ReLU), ("tanh", nn.Tanh), ("silu", nn.SiLU), ("elu", nn.ELU)])
@pytest.mark.parametrize("frames", [10, 20, 50])
def test_the_activation_is_that_of_every_part(name, kind, frames):
    widths = {**WIDTHS, "history": 6 * frames}
    actor = RMAActor(widths, 4, hidden=(8, 7), scan_hidden=(5, 4), priv_hidden=(6, 3), activation=name)
    layers = [type(layer) for layer in actor.modules() if not list(layer.children())]
    convolutions = layers.count(nn.Conv1d)
    nonlinear = [layer for layer in layers if layer.__module__.endswith("activation")]
    # Backbone 2, scan 1 and its tanh, privileged 2, estimator 2, history 2 and one for each convolution.
    expected = 9 + convolutions
    assert len(nonlinear) == expected + 1 and nonlinear.count(kind) == expected + (kind is nn.Tanh)
    usual = RMAActor(widths, 4, hidden=(8, 7), scan_hidden=(5, 4), priv_hidden=(6, 3))
    assert actor.state_dict().keys() == usual.state_dict().keys()


def test_an_unknown_activation_is_refused():
    expected = r"Unknown activation 'gelu'; choose one of \['elu', 'relu', 'silu', 'tanh'\]"
    with pytest.raises(ValueError, match=expected):
        RMAActor(WIDTHS, 4, activation="gelu")
    with pytest.raises(ValueError, match=expected):
        HistoryEncoder(6, 10, 3, activation="gelu")


# Compositions ---------------------------------------------------------------------------------------------------------

SMALL = dict(hidden=(8,), scan_hidden=(4,), priv_hidden=(3,), estimator_hidden=(8,))


def data(shape=(5,)):
    generator = torch.Generator().manual_seed(0)
    td = TensorDict(
        {name: torch.randn(*shape, width, generator=generator) for name, width in WIDTHS.items()}, batch_size=shape
    )
    return td.rename_key_("history", "prop_history")


@pytest.mark.parametrize(
    ("options", "reads"),
    [
        ({}, ["prop", "scan", "priv_explicit", "priv_latent"]),
        (dict(estimated=True), ["prop", "scan", "priv_latent"]),
        (dict(latent="history"), ["prop", "scan", "priv_explicit", "prop_history"]),
        (dict(latent="history", estimated=True), ["prop", "scan", "prop_history"]),
        (dict(latent="switched", estimated=True), ["prop", "scan", "priv_latent", "prop_history"]),
    ],
)
def test_a_policy_reads_what_its_composition_uses(options, reads):
    policy = rma_policy(RMAActor(WIDTHS, 4, **SMALL), **options)
    assert policy.in_keys == reads
    poisoned = data().apply(lambda x: x.clone())
    for key in set(poisoned.keys()) - set(reads):
        poisoned[key].fill_(float("nan"))
    assert policy(poisoned)["loc"].isfinite().all()


def test_compositions_share_weights_and_their_state_dict():
    actor = RMAActor(WIDTHS, 4, **SMALL)
    teacher, deployed = rma_policy(actor), rma_policy(actor, latent="history", estimated=True)
    assert {id(p) for p in teacher.parameters()} == {id(p) for p in deployed.parameters()}
    other = rma_policy(RMAActor(WIDTHS, 4, **SMALL), latent="history", estimated=True)
    other.load_state_dict(teacher.state_dict())
    torch.testing.assert_close(other(data())["loc"], deployed(data())["loc"])


def test_the_switch_chooses_the_latent():
    actor = RMAActor(WIDTHS, 4, **SMALL)
    switched = rma_policy(actor, latent="switched", estimated=True)
    for history in (False, True, False):
        rma_composition(switched).use_history(history)
        same = rma_policy(actor, latent="history" if history else "privileged", estimated=True)
        torch.testing.assert_close(switched(data())["loc"], same(data())["loc"], rtol=0, atol=0)


def test_the_estimate_is_a_constant_and_batches_may_have_any_shape():
    actor = RMAActor(WIDTHS, 4, **SMALL)
    policy = rma_policy(actor, latent="history", estimated=True)
    td = data((2, 3, 4))
    loc = policy(td.clone())["loc"]
    assert loc.shape == (2, 3, 4, 4)
    torch.testing.assert_close(policy(td.reshape(24))["loc"].reshape(2, 3, 4, 4), loc)
    loc.sum().backward()
    assert all(p.grad is None for p in actor.estimator.parameters())


def test_without_a_scan():
    widths = {name: width for name, width in WIDTHS.items() if name != "scan"}
    actor, zero = RMAActor(widths, 4, **SMALL), RMAActor({**widths, "scan": 0}, 4, **SMALL)
    assert actor.scan_encoder is None and [*actor.state_dict()] == [*zero.state_dict()]
    assert rma_policy(actor, "policy")(TensorDict(policy=torch.zeros(2, 74), batch_size=[2]))["loc"].shape == (2, 4)


def test_the_mean_starts_small_and_a_tanh_bounds_it():
    actor = RMAActor(WIDTHS, 4, tanh=True, init_std=0.5)
    loc, scale = rma_policy(actor)(data())["loc"], rma_policy(actor)(data())["scale"]
    assert loc.abs().max() < 0.1
    torch.testing.assert_close(scale, torch.full_like(loc, 0.5))
    with torch.no_grad():
        actor.backbone[-2].weight.mul_(1e6)
    assert rma_policy(actor)(data())["loc"].abs().max() <= 1


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (dict(prop=0), r"Wrong: \['prop'\]"),
        (dict(props=3), "expected the width of each of"),
        (dict(history=61), "history is 61 wide, which is no multiple of the 6 of prop"),
        (dict(history=66), r"history of 11 frames was given; its convolutions exist for \[10, 20, 50\] frames"),
    ],
)
def test_widths_that_do_not_fit_are_refused(change, expected):
    with pytest.raises(ValueError, match=expected):
        RMAActor({**WIDTHS, **change}, 4, **SMALL)


def test_a_wrong_width_prints_the_layout():
    layout = r"prop 6 \| scan 11 \| priv_explicit 3 \| priv_latent 5 \| history 60"
    actor = RMAActor(WIDTHS, 4, **SMALL)
    with pytest.raises(ValueError, match=f"'policy' is 84 wide; expected 85, laid out as {layout}"):
        rma_policy(actor, "policy")(TensorDict(policy=torch.zeros(2, 84), batch_size=[2]))
    with pytest.raises(ValueError, match=rf"widths {{'scan': 12}} were given; expected {layout}"):
        rma_policy(actor)(data().set("scan", torch.zeros(5, 12)))


def test_unknown_keys_latents_and_chunks_that_are_missing():
    actor = RMAActor(WIDTHS, 4, **SMALL)
    with pytest.raises(ValueError, match=r"keys names \['hist'\]; this actor reads"):
        rma_policy(actor, {"hist": "prop_history"})
    with pytest.raises(ValueError, match="latent='histroy' was given"):
        rma_policy(actor, latent="histroy")
    with pytest.raises(ValueError, match="latent='histroy' was given"):
        actor(torch.zeros(2, 6), latent="histroy")
    with pytest.raises(ValueError, match="reads priv_latent, which was not given"):
        actor(torch.zeros(2, 6), torch.zeros(2, 11), torch.zeros(2, 3))
