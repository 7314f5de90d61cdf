"""The RMA actor against published numbers, its compositions, and widths that do not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from edenrl.modules import RMA_CHUNKS, HistoryEncoder, RMAActor, rma_policy

CLOSE = dict(atol=1e-5, rtol=1e-5)
WIDTHS = dict(prop=6, scan=11, priv_explicit=3, priv_latent=5, history=60)


@pytest.fixture(scope="module")
def golden():
    path = Path(__file__).parents[1] / "golden" / "rma.npz"
    return {name: torch.from_numpy(value) for name, value in np.load(path, allow_pickle=False).items()}


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
    torch.testing.assert_close(flat(TensorDict(policy=golden["obs"], batch_size=[7]))["loc"], golden[expected], **CLOSE)
    separate = rma_policy(actor, {"history": "past"}, **options)
    read = {"past" if name == "history" else name: chunk for name, chunk in chunks.items()}
    td = TensorDict({name: read[name] for name in separate.in_keys}, batch_size=[7])
    torch.testing.assert_close(separate(td)["loc"], golden[expected], **CLOSE)


def test_a_scan_latent_from_elsewhere(golden):
    actor = reference_actor(golden)
    chunks = chunks_of(golden["obs"], actor.widths)
    del chunks["scan"]
    loc, _ = actor(**chunks, latent="history", scan_latent=golden["replacement_scan_latent"])
    torch.testing.assert_close(loc, golden["mean_hist_replaced_scan"], **CLOSE)


@pytest.mark.parametrize("frames", [20, 50])
def test_history_encoders_of_other_lengths_equal_the_published_ones(golden, frames):
    encoder = HistoryEncoder(6, frames, 3)
    copy_layers(encoder, golden, history_layers(f"hist{frames}_encoder", golden))
    history = golden[f"hist{frames}_input"]
    torch.testing.assert_close(encoder(history.flatten(1)), golden[f"hist{frames}_latent"], **CLOSE)
