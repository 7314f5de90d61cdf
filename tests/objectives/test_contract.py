"""What holds for every loss, with one case each; the other files hold what is special about a loss."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.data import Bounded
from torchrl.objectives import LossModule

from edenrl.collectors import DepthDistillationCollector, DifferentiableCollector
from edenrl.envs import PointMass, wrap_env
from edenrl.modules import (
    Discriminator,
    HIMLayout,
    RMAActor,
    SignedPermutation,
    TaskConstraint,
    categorical_actor,
    flash_actor,
    flash_critic,
    gaussian_actor,
    him_actor,
    rma_policy,
    value_critic,
)
from edenrl.objectives import LinearRamp, make_loss, registered_losses
from edenrl.testing import check_loss_module
from edenrl.testing.gradients import leaves_behind

spec = importlib.util.spec_from_file_location("depth_task", Path(__file__).parents[1] / "depth_task.py")
assert spec is not None and spec.loader is not None
depth_task = importlib.util.module_from_spec(spec)
spec.loader.exec_module(depth_task)

SHAPE = (4, 5)
BOX = Bounded(-1.0, 1.0, shape=(2,))
# Networks, options of the loss, and a batch with everything that it reads.
Parts = tuple[list[Any], dict[str, Any], TensorDictBase]


# The cases ------------------------------------------------------------------------------------------------------------


def actor_of(kind: str) -> TensorDictModuleBase:
    if kind == "categorical":
        return categorical_actor({"observation": 3}, 3, hidden=(8,))
    return gaussian_actor({"observation": 3}, BOX, hidden=(8,), squash=kind == "squashed")


def acted(actor: nn.Module, critic: nn.Module | None, data: TensorDict, width: int = 1) -> TensorDict:
    """Adds what acting, valuing and the advantage estimator write; the policy has changed since it acted."""
    with torch.no_grad():
        data = actor(data)
        if critic is not None:
            data = critic(data).set("value_target", torch.randn(*data.shape, width))
        data["action_log_prob"] += 0.1 * torch.randn(data.shape)
    return data.set("advantage", torch.randn(*data.shape, width))


def ppo(kind: str = "gaussian") -> Parts:
    actor, critic = actor_of(kind), value_critic({"observation": 3}, hidden=(8,))
    data = TensorDict(observation=torch.randn(*SHAPE, 3), batch_size=SHAPE)
    return [actor, critic], {}, acted(actor, critic, data)


def cmdp() -> Parts:
    actor, critic = actor_of("gaussian"), value_critic({"observation": 3}, num_values=2, hidden=(8,))
    constraint = TaskConstraint(lambda_init=0.4, vg_window=2)
    constraint.update(torch.tensor([[[8.0], [6.0]]]), torch.ones(1, 2, 1, dtype=torch.bool))
    data = TensorDict(observation=torch.randn(*SHAPE, 3), batch_size=SHAPE)
    return [actor, critic, constraint], {}, acted(actor, critic, data, width=2)


def grpo(kind: str = "gaussian", masked: bool = True) -> Parts:
    actor = actor_of(kind)
    data = acted(actor, None, TensorDict(observation=torch.randn(*SHAPE, 3), batch_size=SHAPE))
    if masked:
        data["group_mask"] = torch.rand(*SHAPE, 1) > 0.3
    return [actor], {"entropy_coeff": 0.1}, data


def him_parts() -> tuple[nn.Module, nn.Module, TensorDict]:
    layout = HIMLayout(frame=4, frames=3, order="newest_first")
    actor = him_actor(layout, 2, hidden=(8,), encoder_hidden=(8,), target_hidden=(8,), latent_dim=4, num_prototypes=6)
    critic = value_critic({"critic": 7}, hidden=(8,), normalize=False)
    following = dict(critic=torch.randn(*SHAPE, 7))
    data = TensorDict(history=torch.randn(*SHAPE, 12), critic=torch.randn(*SHAPE, 7), next=following, batch_size=SHAPE)
    return actor, critic, acted(actor, critic, data)


def him(symmetric: bool = True) -> Parts:
    actor, critic, data = him_parts()
    order, sign = [0, 2, 1, 3], [1, -1, -1, 1]
    mirrors = {
        "history": SignedPermutation([4 * t + i for t in range(3) for i in order], sign * 3),
        "critic": SignedPermutation([*order, 4, 5, 6], [*sign, 1, -1, 1]),
        "action": SignedPermutation([1, 0], [-1, -1]),
    }
    return [actor, critic], {"mirrors": mirrors} if symmetric else {}, data


def him_estimator() -> Parts:
    actor, _, data = him_parts()
    estimator: Any = actor.module
    return [estimator[0].module.estimator], {}, data


WIDTHS = dict(prop=6, scan=11, priv_explicit=3, priv_latent=5, history=60)


def rma_data(flat: bool) -> TensorDict:
    data = TensorDict({name: torch.randn(*SHAPE, width) for name, width in WIDTHS.items()}, batch_size=SHAPE)
    if flat:
        return TensorDict(policy=torch.cat(list(data.values()), -1), batch_size=SHAPE)
    return data.rename_key_("history", "prop_history")


def rma_actor() -> RMAActor:
    return RMAActor(WIDTHS, 4, hidden=(12, 8), scan_hidden=(8, 4), priv_hidden=(6, 3), estimator_hidden=(8,))


def rma(flat: bool = False) -> Parts:
    actor, keys = rma_actor(), "policy" if flat else None
    critic = value_critic({"policy": 85} if flat else {"prop": 6, "priv_latent": 5}, hidden=(8,))
    data = acted(rma_policy(actor, keys, latent="switched", estimated=True), critic, rma_data(flat))
    return [rma_policy(actor, keys), critic], {"ramp": LinearRamp(0.1, 0.4, begin=0, length=10)}, data


def rma_dagger(flat: bool = False, **composition: Any) -> Parts:
    return [rma_policy(rma_actor(), "policy" if flat else None, **composition)], {}, rma_data(flat)


def amp() -> Parts:
    net = Discriminator(2, 3, (8, 8))
    net.update_normalization(torch.randn(50, 6))
    windows = {"expert_window": torch.randn(*SHAPE, 6), "amp_window": torch.randn(*SHAPE, 6)}
    return [net], {}, TensorDict(windows, batch_size=SHAPE)


def mirror(kind: str = "gaussian") -> Parts:
    action = SignedPermutation([1, 0], [-1, -1])
    if kind == "rma":
        widths = dict(prop=2, priv_explicit=1, priv_latent=2)
        actor = rma_policy(RMAActor({**widths, "history": 20}, 2, hidden=(8,), priv_hidden=(4,)))
        mirrors = {name: SignedPermutation(range(width), [-1] * width) for name, width in widths.items()}
    else:
        actor, widths = actor_of(kind), {"observation": 3}
        mirrors = {"observation": SignedPermutation([1, 0, 2], [1, 1, -1]), "unread": SignedPermutation([0])}
    data = TensorDict({name: torch.randn(*SHAPE, width) for name, width in widths.items()}, batch_size=SHAPE)
    return [actor, {**mirrors, "action": action}], {}, data


def flashsac() -> Parts:
    actor = flash_actor({"observation": 4}, BOX, hidden_dim=8, num_blocks=1)
    critic = flash_critic({"observation": 4, "extra": 3}, 2, hidden_dim=8, num_blocks=1, num_bins=21)
    ends = dict(observation=torch.randn(*SHAPE, 4), extra=torch.randn(*SHAPE, 3), reward=torch.randn(*SHAPE, 1))
    ends["terminated"] = torch.rand(*SHAPE, 1) < 0.3
    data = dict(observation=torch.randn(*SHAPE, 4), extra=torch.randn(*SHAPE, 3), action=torch.rand(*SHAPE, 2) * 2 - 1)
    steps = torch.randint(1, 4, (*SHAPE, 1))
    return [actor, critic], {}, TensorDict({**data, "next": ends, "steps_to_next_obs": steps}, batch_size=SHAPE)


def apg(dtype: torch.dtype = torch.float32) -> Parts:
    actor = gaussian_actor({"observation": 14}, 2, hidden=(8,)).to(dtype)
    env = PointMass(SHAPE[0], seed=0, max_steps=4, dtype=dtype)
    data = next(iter(DifferentiableCollector(env, actor, SHAPE[1])))
    data["objective_scale"] = torch.rand(*SHAPE, 1, dtype=dtype) + 0.5
    return [actor], {"entropy_coeff": 0.1, "mode": "complete"}, data


def distillation(dtype: torch.dtype = torch.float32) -> Parts:
    teacher, student = depth_task.make_networks(int(torch.randint(100, ())), dtype)
    env = wrap_env(depth_task.DepthTask(SHAPE[0], seed=0, dtype=dtype))
    return [student], {}, next(iter(DepthDistillationCollector(env, teacher, student, SHAPE[1])))


@dataclass(frozen=True)
class Case:
    """A loss, how to build it, and what it promises."""

    build: Callable[..., Parts]
    """Draws networks and batch ``SHAPE`` from torch's generator; keywords vary the networks or the batch."""
    reads: list[NestedKey]
    """``in_keys``."""
    gives: dict[str, list[str] | None]
    """``out_keys``, in order: the parameter groups that a loss reaches, None for a metric."""
    fields: dict[str, str]
    """Fields of ``set_keys`` and the entries of the batch that they name."""
    optional: list[NestedKey] = field(default_factory=list)
    """What a batch may lack."""
    estimates: list[NestedKey] = field(default_factory=list)
    """Further ``in_keys``, which are read only where there is no advantage."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Settings out of range, the refused one first."""
    unbuilt: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    """Coefficients of terms that some settings leave out, and what the error says."""
    variants: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """Further keywords of ``build`` and options of the loss that keep the contract."""
    functional: bool = False
    """Whether it may hold its parameters beside its networks."""
    live: bool = False
    """Whether the batch carries the graph to the parameters of the very networks that the loss holds."""
    keywords: bool = True
    """Whether the batch shape can be told from the tensors."""
    rows: bool = False
    """Whether a sample is a row ``[T]`` and not a step."""
    counted: Callable[[str, TensorDictBase], Tensor | int] | None = None
    """Samples that a loss counts; by default all."""


PPO_READS: list[NestedKey] = ["action", "action_log_prob", "loc", "scale", "advantage"]
CRITIC_READS: list[NestedKey] = ["state_value", "value_target"]
NEXT_READS: list[NestedKey] = [("next", "reward"), ("next", "done"), ("next", "terminated")]
PPO_METRICS = dict.fromkeys(["clip_fraction", "kl_approx", "ESS", "max_ratio", "mean_ratio", "kl"])
PPO_GIVES: dict[str, list[str] | None] = {"loss_objective": ["policy"], **PPO_METRICS}
PPO_GIVES |= {"loss_entropy": ["policy"], "entropy": None}
CRITIC_GIVES: dict[str, list[str] | None] = {"loss_critic": ["critic"], "explained_variance": None}
CRITIC_GIVES |= {"value_clip_fraction": None}
PPO_FIELDS = {"action": "action", "sample_log_prob": "action_log_prob", "loc": "loc", "scale": "scale"}
PPO_FIELDS |= {"advantage": "advantage"}
PPO_WRONG: list[dict[str, Any]] = [{"entropy_coeff": -0.1}, {"action_bound_coeff": -1.0}, {"clip_epsilon": 1.5}]
CRITIC_WRONG: list[dict[str, Any]] = [*PPO_WRONG, {"critic_coeff": -1.0}, {"clip_value": 0.0}]
BOUND: dict[str, tuple[dict[str, Any], str]] = {}
BOUND |= {
    "action_bound_coeff": (
        {},
        "built without the term that action_bound_coeff weighs; build it with action_bound_coeff > 0",
    )
}

CASES = {
    "PPO": Case(
        ppo,
        reads=["observation", *PPO_READS, *CRITIC_READS],
        estimates=[("next", "observation"), *NEXT_READS],
        gives={**PPO_GIVES, **CRITIC_GIVES},
        fields={**PPO_FIELDS, "value_target": "value_target"},
        wrong=CRITIC_WRONG,
        unbuilt=BOUND,
        variants=[
            (dict(kind="squashed"), {}),
            (dict(kind="categorical"), {}),
            ({}, dict(action_bound_coeff=0.5)),
        ],
        functional=True,
    ),
    "CMDP": Case(
        cmdp,
        reads=["observation", *PPO_READS, *CRITIC_READS],
        gives={
            **PPO_GIVES,
            **CRITIC_GIVES,
            **dict.fromkeys(["task_weight", "lambda", "task_return", "task_return_best", "task_ratio"]),
        },
        fields={**PPO_FIELDS, "value_target": "value_target"},
        wrong=CRITIC_WRONG,
        unbuilt=BOUND,
        variants=[({}, dict(action_bound_coeff=0.1))],
        functional=True,
    ),
    "GRPO": Case(
        grpo,
        reads=["observation", *PPO_READS, "group_mask"],
        gives={**PPO_GIVES, "loss_kl": ["policy"], "kl_reference": None},
        fields={**PPO_FIELDS, "mask": "group_mask"},
        optional=["group_mask"],
        wrong=[*PPO_WRONG, {"kl_coeff": -1}],
        unbuilt={**BOUND, "kl_coeff": ({"kl_coeff": 0.0}, "the term that kl_coeff weighs; build it with kl_coeff")},
        variants=[
            (dict(kind="squashed"), {}),
            (dict(kind="categorical"), {}),
            ({}, dict(action_bound_coeff=0.5)),
            ({}, dict(kl_coeff=0.0)),
            (dict(masked=False), {}),
        ],
        functional=True,
        counted=lambda name, batch: batch["group_mask"].sum(),
    ),
    "HIM": Case(
        him,
        reads=["history", "critic", *PPO_READS, *CRITIC_READS],
        estimates=[("next", "history"), ("next", "critic"), *NEXT_READS],
        gives={
            **PPO_GIVES,
            **CRITIC_GIVES,
            "loss_actor_symmetry": ["policy"],
            "equivariance_error": None,
            "loss_critic_symmetry": ["critic"],
        },
        fields={**PPO_FIELDS, "value_target": "value_target"},
        wrong=[*CRITIC_WRONG, {"symmetry_scale": -1}],
        unbuilt={
            **BOUND,
            "symmetry_scale": ({"mirrors": None}, "the term that symmetry_scale weighs; build it with mirrors"),
        },
        variants=[(dict(symmetric=False), {})],
        functional=True,
    ),
    "HIMEstimator": Case(
        him_estimator,
        reads=["history", ("next", "critic")],
        gives={
            "loss_swap": ["estimator"],
            "loss_estimation": ["estimator"],
            **dict.fromkeys(["velocity_error", "velocity_error_relative", "prototype_entropy", "latent_variance"]),
        },
        fields={"history": "history", "critic": "critic"},
        wrong=[
            {"temperature": 0.0},
            {"sinkhorn_eps": -1.0},
            {"sinkhorn_iterations": 0},
            {"reduction": "avg"},
        ],
    ),
    "RMA": Case(
        rma,
        reads=["prop", "scan", "priv_explicit", "priv_latent", "prop_history", *PPO_READS, *CRITIC_READS],
        estimates=[
            ("next", "prop"),
            ("next", "scan"),
            ("next", "priv_explicit"),
            ("next", "priv_latent"),
            *NEXT_READS,
        ],
        gives={
            **PPO_GIVES,
            **CRITIC_GIVES,
            "loss_estimator": ["estimator"],
            "loss_priv_reg": ["policy"],
            "latent_distance": None,
            "priv_reg_weight": None,
        },
        fields={**PPO_FIELDS, "value_target": "value_target", "history": "prop_history"},
        wrong=CRITIC_WRONG,
        unbuilt=BOUND,
        variants=[(dict(flat=True), {})],
        functional=True,
    ),
    "RMADagger": Case(
        rma_dagger,
        reads=["priv_latent", "prop_history"],
        gives={"loss_dagger": ["history_encoder"]},
        fields={"priv_latent": "priv_latent", "history": "prop_history"},
        wrong=[{"reduction": "max"}],
        variants=[
            (dict(flat=flat, **composition), {})
            for flat in (False, True)
            for composition in ({}, dict(latent="history", estimated=True), dict(latent="switched"))
        ],
    ),
    "AMP": Case(
        amp,
        reads=["expert_window", "amp_window"],
        gives={
            "loss_discriminator": ["discriminator"],
            "loss_grad_penalty": ["discriminator"],
            **dict.fromkeys(["d_expert", "d_policy", "accuracy"]),
        },
        fields={"expert_window": "expert_window", "policy_window": "amp_window"},
        wrong=[{"grad_penalty_coeff": -1}, {"reduction": "max"}],
        keywords=False,
    ),
    "Mirror": Case(
        mirror,
        reads=["observation"],
        gives={"loss_symmetry": ["policy"], "symmetry_error": None},
        fields={},
        wrong=[{"symmetry_coeff": -1.0}, {"reduction": "max"}],
        variants=[(dict(kind="squashed"), {}), (dict(kind="rma"), {})],
        keywords=False,
    ),
    "FlashSAC": Case(
        flashsac,
        reads=[
            "observation",
            "extra",
            "action",
            ("next", "observation"),
            ("next", "extra"),
            ("next", "reward"),
            ("next", "terminated"),
            "steps_to_next_obs",
        ],
        gives={
            "loss_actor": ["policy"],
            "loss_temperature": ["temperature"],
            "loss_critic": ["critic"],
            **dict.fromkeys(["entropy", "alpha", "q_value", "target_value"]),
        },
        fields={name: name for name in ("action", "reward", "terminated", "steps_to_next_obs")},
        optional=["steps_to_next_obs"],
        wrong=[{"gamma": 1.5}, {"alpha_init": 0.0}, {"target_sigma": 0.0}, {"tau": 0.0}]
        + [{"bc_coeff": -1.0}, {"reduction": "max"}],
        unbuilt={"bc_coeff": ({}, "the term that bc_coeff weighs; build it with bc_coeff > 0")},
        variants=[({}, dict(bc_coeff=0.5))],
    ),
    "APG": Case(
        apg,
        reads=["observation", ("next", "reward"), ("next", "done"), "elapsed", "objective_scale"],
        gives={
            "loss_objective": ["policy"],
            "loss_entropy": ["policy"],
            **dict.fromkeys(["objective", "entropy", "alive_fraction"]),
        },
        fields={name: name for name in ("reward", "done", "elapsed", "objective_scale")},
        optional=["elapsed", "objective_scale"],
        wrong=[{"gamma": 0.0}, {"gamma": 1.1}, {"entropy_coeff": -1.0}, {"mode": "whole"}, {"reduction": "max"}],
        unbuilt={
            "entropy_coeff": (
                {"entropy_coeff": 0.0},
                "the term that entropy_coeff weighs; build it with entropy_coeff > 0",
            )
        },
        live=True,
        rows=True,
    ),
    "DepthDistillation": Case(
        distillation,
        reads=["teacher_action", "student_action", "yaw", "yaw_prediction", "depth_new"],
        gives={
            "loss_action": ["student_actor", "depth_backbone", "depth_recurrent"],
            "loss_yaw": ["depth_backbone", "depth_recurrent"],
        },
        fields={name: name for name in ("teacher_action", "student_action", "yaw", "yaw_prediction", "depth_new")},
        optional=["depth_new"],
        wrong=[{"reduction": "median"}],
        live=True,
        counted=lambda name, batch: batch["depth_new"].sum() if name == "loss_yaw" else batch.numel(),
    ),
}

every = pytest.mark.parametrize("name", CASES)


def make(
    name: str,
    networks: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[LossModule, TensorDictBase]:
    """The loss by its name and its batch; the same seed gives the same numbers."""
    case = CASES[name]
    torch.manual_seed(seed)
    parts, fixed, batch = case.build(**(networks or {}), **({"dtype": dtype} if case.live else {}))
    loss = make_loss(name.swapcase(), *parts, **{**fixed, **options}).to(dtype)
    if not case.live:
        batch = batch.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.mul_(1.1)  # away from what acted, and from a reference
    return loss, batch


def run(loss: LossModule, batch: TensorDictBase) -> dict[str, Tensor]:
    """Its outputs; what it samples is the same in every call."""
    torch.manual_seed(1)
    return dict(loss(batch).items())


def losses(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in out.items() if name.startswith("loss")}


def total(out: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(losses(out).values())).sum()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], **tolerance: Any) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **tolerance, check_dtype=not tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


# What holds -----------------------------------------------------------------------------------------------------------


def test_every_registered_loss_has_a_case(built_in_losses: frozenset[str]) -> None:
    assert set(CASES) == built_in_losses
    for name in CASES:
        loss = make(name)[0]
        assert type(loss) is registered_losses()[name]


@pytest.mark.parametrize(
    ("name", "networks", "options"),
    [
        (name, networks, {**options, **({"functional": functional} if case.functional else {})})
        for name, case in CASES.items()
        if not case.live
        for networks, options in [({}, {}), *case.variants]
        for functional in ((True, False) if case.functional else (True,))
    ],
)
def test_the_check_for_losses_of_users_passes(name: str, networks: dict[str, Any], options: dict[str, Any]) -> None:
    loss, batch = make(name, networks, **options)
    reaches = {key: groups for key, groups in CASES[name].gives.items() if groups and key in loss.out_keys}
    check_loss_module(loss, batch, reaches=reaches)


@pytest.mark.parametrize("name", sorted({*CASES} - {"APG"}))  # whose simulator may explode: GradientStep drops that
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e30])
def test_an_entry_that_is_not_finite_is_named_before_anything_changes(name: str, value: float) -> None:
    loss, batch = make(name, seed=3)
    before = copy.deepcopy(loss.state_dict())
    held = {key: batch.get(key, None) for key in CASES[name].reads}
    read = [key for key, entry in held.items() if entry is not None and entry.is_floating_point()]
    if name == "DepthDistillation":  # what lies between two images may be NaN
        read = ["teacher_action", "student_action"]
    for key in read:
        bad = batch.clone()
        bad[key] = bad[key].detach().clone()
        bad[key][2, 3, ...] = value
        with pytest.raises(ValueError, match=rf"^{re.escape(repr(key))} holds .* at env 2, step 3 .*batch is refused"):
            loss(bad)
        with pytest.raises(ValueError, match=rf"^{re.escape(repr(key))} holds .* at row {2 * SHAPE[1] + 3} "):
            loss(bad.reshape(-1))
    assert read
    assert_same(loss.state_dict(), before)


def test_the_check_passes_in_evaluation_mode() -> None:
    for name in ("AMP", "FlashSAC"):  # whose networks act differently there
        loss, batch = make(name)
        check_loss_module(
            loss.eval(), batch, reaches={key: groups for key, groups in CASES[name].gives.items() if groups}
        )


@every
def test_inputs_and_outputs_are_those_declared(name: str) -> None:
    case, (loss, batch) = CASES[name], make(name)
    declared = [*case.reads, *case.estimates]
    assert set(loss.in_keys) == set(declared) and len(loss.in_keys) == len(declared)
    assert list(loss.out_keys) == list(case.gives)
    before = batch.clone()
    out = run(loss, batch)
    assert set(out) == set(case.gives)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert all(torch.equal(batch[key], before[key]) for key in before.keys(True, True))
    # Nothing beside what is declared is read.
    assert_same(run(make(name)[0], batch.select(*case.reads)), out)


@pytest.mark.parametrize(
    ("name", "options", "added", "dropped"),
    [
        ("PPO", {"action_bound_coeff": 0.5}, {"loss_action_bound"}, set()),
        ("PPO", {"critic_coeff": 0.0}, set(), set(CRITIC_GIVES)),
        ("PPO", {"clip_value": False}, set(), {"value_clip_fraction"}),
        ("CMDP", {"clip_value": False}, set(), {"value_clip_fraction"}),
        ("GRPO", {"kl_coeff": 0.0}, set(), {"loss_kl", "kl_reference"}),
        ("HIM", {"mirrors": None}, set(), {"loss_actor_symmetry", "loss_critic_symmetry", "equivariance_error"}),
        ("FlashSAC", {"bc_coeff": 0.5}, {"loss_bc"}, set()),
        ("APG", {"entropy_coeff": 0.0}, set(), {"loss_entropy"}),
    ],
)
def test_settings_add_and_drop_outputs(name: str, options: dict[str, Any], added: set[str], dropped: set[str]) -> None:
    loss, batch = make(name, **options)
    assert dropped <= set(CASES[name].gives) and not added & set(CASES[name].gives)
    assert set(run(loss, batch)) == set(loss.out_keys) == (set(CASES[name].gives) | added) - dropped


@every
def test_losses_carry_gradient_and_metrics_are_detached_scalars(name: str) -> None:
    for key, value in run(*make(name)).items():
        trained = CASES[name].gives[key] is not None
        assert trained == key.startswith("loss_") == key.startswith("loss") == value.requires_grad
        assert value.numel() == 1 and value.is_floating_point() and bool(value.isfinite().all())


@every
def test_parameter_groups_hold_what_gets_a_gradient(name: str) -> None:
    loss, batch = make(name)
    groups = {key: {id(p) for p in members} for key, members in loss.parameter_groups().items()}
    members = [p for group in loss.parameter_groups().values() for p in group]
    assert len({id(p) for p in members}) == len(members) > 0
    assert {id(p) for p in members} <= {id(p) for p in loss.parameters()}
    reached = {key: set(leaves_behind(value)) for key, value in losses(run(loss, batch)).items()}
    assert set().union(*reached.values()) == {id(p) for p in members}
    for key, found in reached.items():
        assert {group for group, ids in groups.items() if ids & found} == set(CASES[name].gives[key] or ()), key


@every
def test_a_frozen_parameter_is_in_no_group(name: str) -> None:
    loss = make(name)[0]
    for group, members in loss.parameter_groups().items():
        if len(members) > 1:
            members[0].requires_grad_(False)
            rest = loss.parameter_groups()[group]
            assert [id(p) for p in rest] == [id(p) for p in members[1:]]


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, case in CASES.items() for key in case.fields])
@pytest.mark.parametrize("nested", [False, True])
def test_keys_can_be_renamed(name: str, key: str, nested: bool) -> None:
    loss, batch = make(name)
    expected, old = run(loss, batch), CASES[name].fields[key]
    new: NestedKey = ("renamed", key) if nested else f"renamed_{key}"
    loss, batch = make(name)
    assert getattr(loss.tensor_keys, key) == old
    loss.set_keys(**{key: new})
    place: NestedKey = old
    target = new
    if ("next", old) in CASES[name].reads:
        place, target = ("next", old), unravel_key(("next", new))
    read = set(map(unravel_key, loss.in_keys))
    assert place not in read
    # Mean and deviation are listed where the actor writes them under these names.
    assert target in read or key in ("loc", "scale")
    assert_same(run(loss, batch.exclude(place).set(target, batch[place])), expected)
    loss.set_keys(**{key: None})
    assert getattr(loss.tensor_keys, key) == old and place in loss.in_keys


@every
def test_an_unknown_key_is_refused_by_name(name: str) -> None:
    loss = make(name)[0]
    assert set(CASES[name].fields) <= {field.name for field in fields(loss.tensor_keys)}
    with pytest.raises(ValueError, match="no_such_field"):
        loss.set_keys(no_such_field="x")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.keywords])
def test_it_can_be_called_with_keywords(name: str) -> None:
    loss, batch = make(name)
    expected = run(loss, batch)
    keywords = {
        key if isinstance(key, str) else "_".join(key): batch[key] for key in loss.in_keys if key in batch.keys(True)
    }
    loss = make(name)[0]
    torch.manual_seed(1)
    out = loss(**keywords)
    out = out if isinstance(out, tuple) else (out,)
    assert_same(dict(zip(loss.out_keys, out, strict=True)), expected)
    loss, last = make(name)[0], list(losses(expected))[-1]
    loss.select_out_keys(last)
    torch.manual_seed(1)
    assert torch.equal(loss(**keywords), expected[last])


@every
def test_reductions_agree(name: str) -> None:
    case, batch = CASES[name], make(name)[1]
    each = {kind: losses(run(*make(name, reduction=kind))) for kind in ("none", "sum", "mean")}
    samples = batch.shape[:-1] if case.rows else batch.shape
    for key, values in each["none"].items():
        assert values.shape == samples
        torch.testing.assert_close(each["sum"][key].reshape(()), values.sum())
        count = samples.numel() if case.counted is None else case.counted(key, batch)
        torch.testing.assert_close(each["mean"][key].reshape(()), values.sum() / count)
    assert set(run(*make(name, reduction="none"))) == set(case.gives)


@every
def test_every_batch_shape_gives_the_same(name: str) -> None:
    case, (loss, batch) = CASES[name], make(name)
    expected = losses(run(loss, batch))
    n, t = SHAPE
    for shape in ((1, n, t), (2, n // 2, t)) if case.rows else ((n * t,), (1, n * t), (2, n // 2, t)):
        assert_same(losses(run(make(name)[0], batch.reshape(shape))), expected, rtol=1e-5, atol=1e-6)
    # A sample alone, without a batch dimension, is a batch of one.
    index = 0 if case.rows else (0, 0)
    alone, one = batch[index], batch[:1] if case.rows else batch[:1, 0]
    assert alone.batch_size == (() if not case.rows else (t,))
    assert_same(run(make(name)[0], alone), run(make(name)[0], one), rtol=1e-5, atol=1e-6)


@every
def test_the_precision_is_that_of_parameters_and_data(name: str) -> None:
    single, double = (run(*make(name, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    assert {value.dtype for value in single.values()} == {torch.float32}
    assert {value.dtype for value in double.values()} == {torch.float64}
    if not CASES[name].live and name != "FlashSAC":  # these draw other random numbers
        assert_same(double, single, rtol=1e-4, atol=1e-5)


@every
def test_a_copy_is_equal_and_independent(name: str) -> None:
    loss, batch = make(name)
    twin = copy.deepcopy(loss)
    kept = copy.deepcopy(twin.state_dict())
    assert set(loss.parameter_groups()) == set(twin.parameter_groups())
    assert {id(p) for p in loss.parameters()}.isdisjoint({id(p) for p in twin.parameters()})
    out = run(loss, batch)
    total(out).backward()
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(1.0)
    assert all(p.grad is None for p in twin.parameters())
    for key, value in twin.state_dict().items():
        assert torch.equal(value, kept[key]) if isinstance(value, Tensor) else value == kept[key], key
    assert_same(run(twin, batch), out)


@every
def test_the_state_comes_back_from_a_file(name: str) -> None:
    loss, batch = make(name)
    run(loss, batch)  # moves what a call moves
    file = io.BytesIO()
    torch.save(loss.state_dict(), file)
    file.seek(0)
    other = make(name, seed=1)[0]
    before = {key: value for key, value in other.state_dict().items() if isinstance(value, Tensor)}
    assert any(not torch.equal(value, before[key]) for key, value in loss.state_dict().items() if key in before)
    other.load_state_dict(torch.load(file, weights_only=True))
    for key, value in loss.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]) if isinstance(value, Tensor) else True, key
    assert_same(run(other, batch), run(loss, batch), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, case in CASES.items() for key in case.reads if key not in case.optional]
)
def test_a_missing_entry_is_named(name: str, key: NestedKey) -> None:
    loss, batch = make(name)
    with pytest.raises((KeyError, ValueError)) as raised:
        loss(batch.exclude(key))
    said = re.sub(r"set_keys\(.*?\)", "", str(raised.value))  # an advice, which names entries in any case
    assert re.search(rf"\b{key if isinstance(key, str) else key[-1]}\b", said), said


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, case in CASES.items() for key in case.optional])
def test_an_optional_entry_may_be_missing(name: str, key: NestedKey) -> None:
    loss, batch = make(name)
    assert set(run(loss, batch.exclude(key))) == set(CASES[name].gives)


@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name, case in CASES.items() for options in case.wrong]
)
def test_settings_out_of_range_are_refused_by_name(name: str, options: dict[str, Any]) -> None:
    (setting, value), *_ = options.items()
    with pytest.raises(ValueError, match=rf"{setting}[\s\S]*{value!r}"):
        make(name, **options)


@pytest.mark.parametrize(
    ("name", "coefficient"), [(name, coefficient) for name, case in CASES.items() for coefficient in case.unbuilt]
)
def test_the_coefficient_of_a_term_that_was_left_out_cannot_be_set(name: str, coefficient: str) -> None:
    options, message = CASES[name].unbuilt[coefficient]
    loss = make(name, **options)[0]
    with pytest.raises(AttributeError, match=message):
        setattr(loss, coefficient, 0.5)


@pytest.mark.parametrize(
    ("name", "coefficient", "term", "options"),
    [
        ("PPO", "entropy_coeff", "loss_entropy", {}),
        ("PPO", "critic_coeff", "loss_critic", {}),
        ("PPO", "action_bound_coeff", "loss_action_bound", {"action_bound_coeff": 0.5}),
        ("GRPO", "kl_coeff", "loss_kl", {}),
        ("HIM", "symmetry_scale", "loss_actor_symmetry", {}),
        ("HIM", "symmetry_scale", "loss_critic_symmetry", {}),
        ("AMP", "grad_penalty_coeff", "loss_grad_penalty", {}),
        ("Mirror", "symmetry_coeff", "loss_symmetry", {}),
        ("FlashSAC", "bc_coeff", "loss_bc", {"bc_coeff": 0.5}),
        ("APG", "entropy_coeff", "loss_entropy", {}),
    ],
)
def test_a_coefficient_is_state_and_can_be_scheduled(
    name: str, coefficient: str, term: str, options: dict[str, Any]
) -> None:
    loss, batch = make(name, **options)
    before, value = run(loss, batch), float(getattr(loss, coefficient))
    loss = make(name, **options)[0]
    setattr(loss, coefficient, 2 * value)
    after = run(loss, batch)
    torch.testing.assert_close(after[term], 2 * before[term])
    shared = {term, *([key for key in before if "symmetry" in key] if name == "HIM" else [])}
    for key in set(losses(before)) - shared:
        assert torch.equal(after[key], before[key]), key
    other = make(name, seed=1, **options)[0]
    other.load_state_dict(loss.state_dict())
    assert float(getattr(other, coefficient)) == pytest.approx(2 * value)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.functional])
def test_with_and_without_a_functional_copy_it_is_the_same(name: str) -> None:
    results = []
    for functional in (True, False):
        loss, batch = make(name, functional=functional)
        assert loss.functional is functional
        out = run(loss, batch)
        groups = loss.parameter_groups()
        gradients = {key: torch.autograd.grad(total(out), group, retain_graph=True) for key, group in groups.items()}
        # The order of the parameters in a group is no promise.
        order = {key: sorted(found, key=lambda g: (*g.shape, float(g.norm()))) for key, found in gradients.items()}
        results.append((out, order))
    (one, its), (other, others) = results
    assert_same(one, other)
    assert set(its) == set(others)
    for key, found in its.items():
        torch.testing.assert_close(found, others[key])


@pytest.mark.parametrize("functional", [True, False])
@every
def test_a_reset_does_something_or_says_that_it_does_not(name: str, functional: bool) -> None:
    resets = functional and CASES[name].functional
    loss = make(name, **({"functional": functional} if CASES[name].functional else {}))[0]
    before = {key: parameter.detach().clone() for key, parameter in loss.named_parameters()}
    refusal = f"{type(loss).__name__} holds no functional network"
    with contextlib.nullcontext() if resets else pytest.warns(UserWarning, match=refusal):
        loss.reset_parameters_recursive()
    weights = [key for key in before if "weight" in key]
    assert weights and all(torch.equal(before[key], loss.get_parameter(key)) != resets for key in weights)


@every
def test_networks_of_the_wrong_kind_are_refused_by_name(name: str) -> None:
    torch.manual_seed(0)
    parts, fixed, _ = CASES[name].build()
    arguments = list(inspect.signature(registered_losses()[name]).parameters)
    for place, argument in enumerate(arguments[: len(parts)]):
        for wrong in (nn.Linear(3, 2), 3, torch.zeros(2), nn.Linear):
            given = [*parts[:place], wrong, *parts[place + 1 :]]
            with pytest.raises(ValueError, match=rf"^{registered_losses()[name].__name__} needs {argument} to be a"):
                make_loss(name, *given, **fixed)


@pytest.mark.parametrize("name", ["PPO", "CMDP", "HIM", "RMA", "FlashSAC"])
def test_actor_and_critic_that_are_swapped_are_refused(name: str) -> None:
    (actor, critic, *rest), fixed, _ = CASES[name].build()
    with pytest.raises(ValueError, match="needs actor_network to be an? .* and has no distribution"):
        make_loss(name, critic, actor, *rest, **fixed)
    with pytest.raises(ValueError, match="needs critic_network to be a .*which is a policy"):
        make_loss(name, actor, actor, *rest, **fixed)
