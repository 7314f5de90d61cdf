"""check_loss_module lets good losses pass and names the one clause that each bad loss breaks."""

from dataclasses import dataclass

import pytest
import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential, dispatch
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, LossModule

from edenrl.modules import gaussian_actor, value_critic
from edenrl.objectives import PPOLoss
from edenrl.testing import check_loss_module


class Imitation(LossModule):
    """A small loss that keeps the whole contract: a student fits the targets and follows a frozen teacher."""

    @dataclass
    class _AcceptedKeys:
        observation: NestedKey = "observation"
        target: NestedKey = "target"

    default_keys = _AcceptedKeys
    _schedulable_buffers = frozenset({"fit_coeff", "follow_coeff"})
    out_keys = ["loss_fit", "loss_follow", "error"]

    def __init__(self, reduction="mean"):
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 1), nn.Linear(3, 1)
        self.teacher.requires_grad_(False)
        self.register_coeff_buffer("fit_coeff", 2.0)
        self.register_coeff_buffer("follow_coeff", 0.5)
        self.reduction = reduction

    @property
    def in_keys(self):
        return [self.tensor_keys.observation, self.tensor_keys.target]

    def parameter_groups(self):
        return {"student": list(self.student.parameters())}

    def errors(self, tensordict):
        """Differences to the target and to the teacher, per step."""
        observation, target = (tensordict.get(key) for key in (self.tensor_keys.observation, self.tensor_keys.target))
        prediction = self.student(observation)
        return (prediction - target).squeeze(-1), (prediction - self.teacher(observation)).squeeze(-1)

    @dispatch
    def forward(self, tensordict):
        fit, follow = self.errors(tensordict)
        return TensorDict(
            loss_fit=self._reduce_loss(self.fit_coeff * fit.square(), tensordict),
            loss_follow=self._reduce_loss(self.follow_coeff * follow.square(), tensordict),
            error=fit.detach().abs().mean(),
        )


class Edited(Imitation):
    """Imitation with an output changed by `edit`."""

    def edit(self, out, tensordict):
        raise NotImplementedError

    @dispatch
    def forward(self, tensordict):
        out = super().forward(tensordict)
        self.edit(out, tensordict)
        return out


@pytest.fixture
def batch():
    return TensorDict(observation=torch.randn(4, 5, 3), target=torch.randn(4, 5, 1), batch_size=[4, 5])


# Losses that break one clause each, by the words that the message must hold.
MUTANTS = {}


def caught(*words):
    def register(mutant):
        MUTANTS[mutant.__name__] = mutant, words
        return mutant

    return register


@caught("doubling 'fit_coeff' must scale 'loss_fit' alone", "multiply 'loss_fit'")
class UnweightedLoss(Edited):
    def edit(self, out, tensordict):
        out["loss_fit"] = out["loss_fit"] / self.fit_coeff


@caught("the zero 'fit_coeff' must scale 'loss_fit' alone")
class ZeroDoesNotSwitchOff(Edited):
    def __init__(self):
        super().__init__()
        self.fit_coeff = 0.0

    def edit(self, out, tensordict):
        per_step = self.errors(tensordict)[0].square()
        out["loss_fit"] = self._reduce_loss((1 + self.fit_coeff) * per_step, tensordict)


@caught("doubling 'fit_coeff' must scale 'loss_fit' alone", "'loss_follow' is")
class CoefficientScalesAnotherLoss(Edited):
    def edit(self, out, tensordict):
        out["loss_follow"] = out["loss_follow"] * self.fit_coeff


@caught("'extra_coeff' cannot be scheduled", "_schedulable_buffers")
class UnschedulableCoefficient(Imitation):
    def __init__(self):
        super().__init__()
        self.register_buffer("extra_coeff", torch.ones(()))


@caught("'fit_coeff' is a plain number", "register_coeff_buffer")
class PlainCoefficient(Imitation):
    def __init__(self):
        super().__init__()
        del self.fit_coeff
        self.fit_coeff = 2.0


@caught("the metric 'error' carries gradient", "detach()")
class AttachedMetric(Edited):
    def edit(self, out, tensordict):
        out["error"] = self.errors(tensordict)[0].abs().mean()


@caught("'loss_rate' carries no gradient", "a metric must have a name")
class MetricNamedLikeALoss(Edited):
    out_keys = [*Imitation.out_keys, "loss_rate"]

    def edit(self, out, tensordict):
        out["loss_rate"] = out["error"]


@caught("'lossless' would be optimized")
class MetricStartsWithLoss(Edited):
    out_keys = [*Imitation.out_keys, "lossless"]

    def edit(self, out, tensordict):
        out["lossless"] = out["error"]


@caught("no entry starts with 'loss_'")
class NoLoss(Edited):
    def edit(self, out, tensordict):
        for key in ("loss_fit", "loss_follow"):
            del out[key]


@caught("the metric 'error' is torch.float32 of shape (4, 5)")
class VectorMetric(Edited):
    def edit(self, out, tensordict):
        out["error"] = self.errors(tensordict)[0].detach()


@caught("the metric 'error' is torch.bool")
class BooleanMetric(Edited):
    def edit(self, out, tensordict):
        out["error"] = out["error"] > 0


@caught("`out_keys`", "leaves out ['bias']")
class UndeclaredOutput(Edited):
    def edit(self, out, tensordict):
        out["bias"] = self.student.bias.detach()


@caught("promises ['bias'] that is not returned")
class MissingOutput(Imitation):
    out_keys = [*Imitation.out_keys, "bias"]


@caught("set_keys(target='renamed_target')", "self.tensor_keys.target")
class HardCodedKey(Edited):
    def edit(self, out, tensordict):
        out["error"] = tensordict["target"].mean()


@caught("set_keys(target=('renamed', 'target'))")
class NestedKeyRefused(Edited):
    def edit(self, out, tensordict):
        out["error"] = tensordict.get(f"{self.tensor_keys.target}").mean()


@caught("forward reads ['weight'], which set_keys cannot rename", "_AcceptedKeys")
class UnnamedKey(Edited):
    def edit(self, out, tensordict):
        out["error"] = tensordict.get("weight").mean()


@caught("`_AcceptedKeys` ignores ['target']", "annotate")
class UnannotatedKey(Imitation):
    @dataclass
    class _AcceptedKeys:
        observation: NestedKey = "observation"
        target = "target"


@caught("no `default_keys`", "default_keys = _AcceptedKeys")
class NoDefaultKeys(Imitation):
    default_keys = None


@caught("set_keys(observation=None) gives 'policy' instead of the default 'observation'")
class NoneDoesNotReset(Imitation):
    def set_keys(self, **keys):
        super().set_keys(**{name: "policy" if key is None else key for name, key in keys.items()})


@caught("set_keys accepts the unknown name")
class AcceptsAnyName(Imitation):
    def set_keys(self, **keys):
        super().set_keys(**{name: key for name, key in keys.items() if name in ("observation", "target")})


@caught("forward reads ['target'], which `in_keys` leaves out")
class UndeclaredInput(Imitation):
    @property
    def in_keys(self):
        return [self.tensor_keys.observation]


@caught("the keyword call loss(observation=..., target=...) fails", "dispatch")
class NoDispatch(Imitation):
    def forward(self, tensordict):
        return Imitation.forward(self, tensordict)


@caught("'loss_fit' has shape () under reduction='none'", "_reduce_loss")
class IgnoresNone(Edited):
    def edit(self, out, tensordict):
        out["loss_fit"] = out["loss_fit"].mean()


@caught("'loss_fit' has shape (4, 5) under reduction='mean'", "_reduce_loss")
class NeverReduces(Edited):
    def edit(self, out, tensordict):
        out["loss_fit"] = self.fit_coeff * self.errors(tensordict)[0].square()


@caught("under reduction='sum', but 'none' sums to")
class SumIsMean(Edited):
    def edit(self, out, tensordict):
        if self.reduction == "sum":
            out["loss_fit"] = out["loss_fit"] / tensordict.numel()


@caught("under reduction='mean', but 'none' sums to", "over 20 steps")
class MeanIsSum(Edited):
    def edit(self, out, tensordict):
        if self.reduction == "mean":
            out["loss_fit"] = out["loss_fit"] * tensordict.numel()


@caught("with the batch (4, 5) reshaped to (20,)", "'loss_fit' is")
class DependsOnTheFirstDimension(Edited):
    def edit(self, out, tensordict):
        fit = self.errors(tensordict)[0]
        out["loss_fit"] = self._reduce_loss(self.fit_coeff * (fit - fit.mean(0)).square(), tensordict)


@caught("with the batch (4, 5) reshaped to (20,), forward raises")
class NeedsTwoDimensions(Edited):
    def edit(self, out, tensordict):
        self.errors(tensordict)[0].transpose(0, 1)


@caught("forward changed its input: added ['prediction']")
class WritesANewEntry(Edited):
    def edit(self, out, tensordict):
        tensordict["prediction"] = self.student(tensordict["observation"])


@caught("overwrote ['target']", "in-place")
class WritesInPlace(Edited):
    def edit(self, out, tensordict):
        tensordict.get(self.tensor_keys.target).clamp_(-0.1, 0.1)


@caught("no `parameter_groups()`")
class NoGroups(Imitation):
    parameter_groups = None


@caught("gradient reaches parameters outside", "'teacher.weight': ['loss_follow']", "detach")
class TrainsTheTeacher(Imitation):
    def __init__(self):
        super().__init__()
        self.teacher.requires_grad_(True)


@caught("gradient reaches parameters outside", "an unregistered tensor (1, 3)")
class TrainsAHiddenTeacher(Imitation):
    def __init__(self):
        super().__init__()
        teacher = nn.Linear(3, 1)
        del self.teacher
        self.__dict__["teacher"] = teacher


@caught("declares ['teacher.bias', 'teacher.weight'], which no loss reaches")
class DeclaresTheTeacher(Imitation):
    def parameter_groups(self):
        return {"student": list(self.student.parameters()), "teacher": list(self.teacher.parameters())}


@caught("the parameter groups 'student' and 'head' share ['student.bias']")
class OverlappingGroups(Imitation):
    def parameter_groups(self):
        return {"student": list(self.student.parameters()), "head": [self.student.bias]}


@caught("forward changes ['calls']", "buffer")
class CountsInAnAttribute(Edited):
    calls = 0

    def edit(self, out, tensordict):
        self.calls += 1
        out["loss_fit"] = out["loss_fit"] * (1 + self.calls)


@caught("state_dict does not restore the loss after two calls", "persistent")
class CountsInAnUnsavedBuffer(Edited):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def edit(self, out, tensordict):
        self.calls += 1
        out["loss_fit"] = out["loss_fit"] * (1 + self.calls)


@caught("load_state_dict does not restore ['follow_coeff']")
class LoadsPartially(Imitation):
    def load_state_dict(self, state_dict, strict=True, assign=False):
        kept = {name: value for name, value in state_dict.items() if name != "follow_coeff"}
        return super().load_state_dict(kept, strict=False)


@caught("the tensor attributes ['offset']", "register_buffer")
class PlainTensor(Imitation):
    def __init__(self):
        super().__init__()
        self.offset = torch.zeros(1)


@caught("after .to(torch.float64) on such data, forward raises RuntimeError", "dtype and device of the data")
class Float32Constant(Edited):
    def edit(self, out, tensordict):
        out["error"] = (self.errors(tensordict)[0].detach() @ torch.ones(tensordict.shape[-1])).mean()


@caught("after .to(torch.float64) on such data the dtypes are {'loss_fit': torch.float32}")
class CastsToFloat32(Edited):
    def edit(self, out, tensordict):
        out["loss_fit"] = out["loss_fit"].float()


@caught("'loss_fit' is torch.float64, the parameters are {torch.float32}")
class CastsToFloat64(Edited):
    def edit(self, out, tensordict):
        out["loss_fit"] = out["loss_fit"].double()


@caught("with ['observation', 'target'] times 0, ['error'] is not finite", "guard divisions")
class ZeroByZero(Edited):
    def edit(self, out, tensordict):
        target = tensordict.get(self.tensor_keys.target)
        out["error"] = (target / target.norm()).mean()


@caught("with ['observation', 'target'] times 1000", "is not finite")
class Overflows(Edited):
    def edit(self, out, tensordict):
        out["error"] = tensordict.get(self.tensor_keys.target).exp().mean()


@caught("times 0, the gradient of ['student.weight'] is not finite")
class InfiniteDerivative(Edited):
    def edit(self, out, tensordict):
        # A root of zero: its value is fine, its derivative is not.
        pull = (tensordict.get(self.tensor_keys.observation) @ self.student.weight.T).square().sum(-1).sqrt()
        out["loss_fit"] = out["loss_fit"] + self._reduce_loss(self.fit_coeff * pull, tensordict)


def test_a_sound_loss_passes_and_stays_as_it_was(batch):
    loss, data, before = Imitation(), batch.clone(), torch.random.get_rng_state()
    state = {name: value.clone() for name, value in loss.state_dict().items()}
    check_loss_module(loss, data, reaches={"loss_fit": ["student"], "loss_follow": ["student"]})
    assert all(torch.equal(value, state[name]) for name, value in loss.state_dict().items())
    assert loss.tensor_keys == Imitation._AcceptedKeys() and loss.reduction == "mean"
    assert all(parameter.grad is None for parameter in loss.parameters())
    assert (data == batch).all() and set(data.keys()) == set(batch.keys())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_broken_clause_is_named(name, batch):
    mutant, words = MUTANTS[name]
    if mutant is UnnamedKey:
        batch["weight"] = torch.ones(4, 5, 1)
    with pytest.raises(AssertionError) as caught:
        check_loss_module(mutant(), batch)
    assert all(word in str(caught.value) for word in (name, *words)), str(caught.value)


class Gated(Edited):
    """Counts only the steps whose gate is open, keeps a ramp in a buffer and refuses an empty batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ramp", torch.zeros(()))

    def edit(self, out, tensordict):
        fit = self.errors(tensordict)[0]
        gate = tensordict.get(self.tensor_keys.target).squeeze(-1) > 0
        if not bool(gate.any()):
            raise ValueError("No step counts.")
        self.ramp += 1
        per_step = self.fit_coeff * self.ramp * fit.square() * gate
        count = gate.sum() if self.reduction == "mean" else 1
        out["loss_fit"] = per_step if self.reduction == "none" else per_step.sum() / count


def test_gates_ramps_in_buffers_and_refusals_are_allowed(batch):
    check_loss_module(Gated(), batch)


def test_next_step_rewards_are_renamed_where_they_stand(batch):
    class Rewarded(Edited):
        @dataclass
        class _AcceptedKeys(Imitation._AcceptedKeys):
            reward: NestedKey = "reward"

        default_keys = _AcceptedKeys

        @property
        def in_keys(self):
            return [*super().in_keys, ("next", self.tensor_keys.reward)]

        def edit(self, out, tensordict):
            out["error"] = tensordict.get(("next", self.tensor_keys.reward)).mean()

    class HardCoded(Rewarded):
        def edit(self, out, tensordict):
            out["error"] = tensordict["next", "reward"].mean()

    batch["next"] = TensorDict(reward=torch.randn(4, 5, 1), batch_size=[4, 5])
    check_loss_module(Rewarded(), batch)
    with pytest.raises(AssertionError, match="set_keys.reward='renamed_reward'"):
        check_loss_module(HardCoded(), batch)


def rollout(actor, critic, shape):
    td = critic(actor(TensorDict(observation=torch.randn(*shape, 3), batch_size=shape))).detach()
    return td.update({"advantage": torch.randn(*shape, 1), "value_target": torch.randn(*shape, 1)})


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_value": False, "normalize_advantage": True},
        {"reduction": "none", "loss_critic_type": "smooth_l1"},
        {"critic_coeff": 0.0, "entropy_bonus": False},
        {"action_bound_coeff": 0.5, "entropy_coeff": 0.0},
    ],
    ids=str,
)
def test_ppo_passes(options, functional):
    actor, critic = gaussian_actor({"observation": 3}, 2, hidden=(8,)), value_critic({"observation": 3}, hidden=(8,))
    loss = PPOLoss(actor, critic, functional=functional, **options)
    owners = {"loss_objective": ["policy"], "loss_entropy": ["policy"], "loss_critic": ["critic"]}
    reaches = {key: groups for key, groups in owners.items() if key in loss.out_keys}
    for shape in ((7,), (2, 3)):
        check_loss_module(loss, rollout(actor, critic, shape), reaches=reaches)


def test_a_shared_trunk_is_seen_through_the_copies():
    trunk = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["hidden"])
    actor = ProbabilisticActor(
        TensorDictSequential(trunk, TensorDictModule(nn.Linear(4, 2), in_keys=["hidden"], out_keys=["logits"])),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    critic = TensorDictSequential(trunk, ValueOperator(nn.Linear(4, 1), in_keys=["hidden"]))
    data = rollout(actor, critic, (4, 5))
    loss = PPOLoss(actor, critic)
    check_loss_module(loss, data, reaches={"loss_critic": ["policy", "critic"]})
    shapes = {name: [tuple(p.shape) for p in group] for name, group in loss.parameter_groups().items()}
    assert shapes == {"policy": [(4, 3), (4,), (2, 4), (2,)], "critic": [(1, 4), (1,)]}
    separate = PPOLoss(actor, critic, separate_losses=True)
    check_loss_module(separate, data, reaches={"loss_critic": ["critic"]})
    with pytest.raises(AssertionError, match=r"'loss_critic' reaches the groups \['critic'\] instead of"):
        check_loss_module(separate, data, reaches={"loss_critic": ["policy", "critic"]})


def test_a_ppo_that_hard_codes_the_stored_value_is_caught():
    """The critic writes this key, so the check renames it in the network too, and still sees who ignores the field."""

    class HardCodedValue(PPOLoss):
        @dispatch
        def forward(self, tensordict):
            out = super().forward(tensordict)
            return out.set("explained_variance", tensordict["state_value"].var())

    actor, critic = gaussian_actor({"observation": 3}, 2, hidden=(8,)), value_critic({"observation": 3}, hidden=(8,))
    with pytest.raises(AssertionError, match="set_keys.value='renamed_value'.*state_value"):
        check_loss_module(HardCodedValue(actor, critic), rollout(actor, critic, (4, 5)))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 5), {}, r"the metric 'explained_variance' is torch.float32 of shape \(5, 1\)"),
        ((20,), {}, r"`out_keys` promises \[\] that is not returned and leaves out \['explained_variance'\]"),
        ((4, 5), {"log_explained_variance": False}, r"the metric 'ESS' is torch.float32 of shape \(5,\)"),
        ((20,), {"log_explained_variance": False}, r"no `parameter_groups\(\)`"),
    ],
)
def test_the_parent_of_ppo_does_not_keep_the_contract(shape, options, message):
    actor, critic = gaussian_actor({"observation": 3}, 2, hidden=(8,)), value_critic({"observation": 3}, hidden=(8,))
    with pytest.raises(AssertionError, match=message):
        check_loss_module(ClipPPOLoss(actor, critic, **options), rollout(actor, critic, shape))


class Broken(UnschedulableCoefficient, PlainCoefficient, LoadsPartially):
    """Three clauses at once, and two metrics that are no scalars."""

    def __init__(self):
        super().__init__()
        self.constant = torch.zeros(2)

    def forward(self, tensordict):
        return super().forward(tensordict).update({"one": torch.zeros(2), "two": torch.zeros(3)})


def test_all_violations_are_reported_at_once(batch):
    with pytest.raises(AssertionError) as caught:
        check_loss_module(Broken(), batch)
    lines = str(caught.value).splitlines()
    wanted = ["'constant'", "the metric 'one'", "the metric 'two'", "`out_keys`", "cannot be scheduled"]
    for words in [*wanted, "load_state_dict does not restore"]:
        assert sum(words in line for line in lines) == 1, f"{words}: {caught.value}"
    assert all(line.startswith("Broken: ") for line in lines)


def test_misuse_is_refused(batch):
    with pytest.raises(ValueError, match=r"with 2 steps or more, got \(1,\)"):
        check_loss_module(Imitation(), batch.reshape(-1)[:1])
    with pytest.raises(ValueError, match=r"`reaches` names \['actor', 'loss_style'\].*\['student'\]"):
        check_loss_module(Imitation(), batch, reaches={"loss_style": ["student"], "loss_fit": ["actor"]})
    with pytest.raises(AssertionError, match="not a LossModule"):
        check_loss_module(nn.Linear(3, 1), batch)
    with pytest.raises(AssertionError, match="on the given batch, forward raises"):
        check_loss_module(Imitation(), batch.exclude("target"))
