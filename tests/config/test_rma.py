"""RMAConfig: what the actor reads, from the groups of an environment."""

import re

import pytest

from edenrl.config import DepthDistillationConfig, RMAConfig, RunConfig

PUBLISHED = {"prop": 6, "priv_explicit": 3, "priv_latent": 5, "prop_history": 60, "scan": 11, "metricless": 2}
NAMES = {name: name for name in ("prop", "scan", "priv_explicit", "priv_latent")} | {"history": "prop_history"}


def test_groups_of_the_usual_names_with_and_without_a_scan():
    widths, keys = RMAConfig().layout(PUBLISHED)
    assert widths == dict(prop=6, scan=11, priv_explicit=3, priv_latent=5, history=60) and keys == NAMES
    without = {name: width for name, width in PUBLISHED.items() if name != "scan"}
    widths, keys = RMAConfig().layout(without)
    assert "scan" not in widths and keys == {name: key for name, key in NAMES.items() if name != "scan"}


def test_named_groups_and_one_flat_group():
    renamed = {f"my_{name}": width for name, width in PUBLISHED.items()}
    groups = ["my_prop", "my_scan", "my_priv_explicit", "my_priv_latent", "my_prop_history"]
    widths, keys = RMAConfig(actor_groups=groups).layout(renamed)
    assert widths["scan"] == 11 and list(keys.values()) == groups
    widths, keys = RMAConfig(actor_groups=[groups[0], *groups[2:]]).layout(renamed)
    assert list(widths) == ["prop", "priv_explicit", "priv_latent", "history"] and keys["history"] == "my_prop_history"
    # Whatever order the widths are written in, the layout is prop | scan | priv_explicit | priv_latent | history.
    shuffled = dict(history=60, priv_latent=5, prop=6, priv_explicit=3)
    widths, key = RMAConfig(actor_groups=["policy"], widths=shuffled).layout({"policy": 74})
    assert list(widths) == ["prop", "priv_explicit", "priv_latent", "history"] and key == "policy"


def test_activations_of_actor_and_critic_are_two_settings():
    config = RMAConfig(actor_activation="silu", activation="tanh")
    assert config.network_options()["activation"] == "silu" and config.activation == "tanh"
    assert RMAConfig().network_options()["activation"] == "elu"


def test_what_does_not_fit_names_the_layout():
    with pytest.raises(ValueError, match=r"753 wide, laid out as prop 53 \| scan 132 .*groups of this environment"):
        RMAConfig(actor_groups=["policy"]).layout({"policy": 752})
    with pytest.raises(ValueError, match=r"RMA reads .*lacks \['priv_latent'\]; its groups are"):
        RMAConfig().layout({name: width for name, width in PUBLISHED.items() if name != "priv_latent"})
    with pytest.raises(ValueError, match="actor_groups names 2 groups"):
        RMAConfig(actor_groups=["prop", "history"])
    with pytest.raises(ValueError, match=r"widths names \['hist'\]"):
        RMAConfig(widths={"hist": 60})


@pytest.mark.parametrize(
    ("config", "start", "end"),
    [
        (RMAConfig, "## Settings", "## Differences from the original"),
        (DepthDistillationConfig, "### Settings of the student", "### Differences of the student"),
    ],
)
def test_the_tables_of_the_page_name_every_setting_and_no_other(root, config, start, end):
    page = (root / "docs" / "pages" / "algorithms" / "rma.md").read_text()
    section = page.partition(f"\n{start}\n")[2].partition(f"\n{end}")[0]
    named = {part for line in section.splitlines() if line.startswith("|") for part in re.findall(r"`([\w.]+)`", line)}
    of_algorithm = {name.removeprefix("algorithm.") for name in named if name.startswith("algorithm.")}
    assert of_algorithm | {"name"} == set(config.model_fields) | {"name"}
    groups = {name.partition(".")[0] for name in named if name.startswith(("env.", "checkpoint.", "evaluation."))}
    assert groups <= set(RunConfig.model_fields)
