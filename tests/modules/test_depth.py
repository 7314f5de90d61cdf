"""The depth student's networks against published numbers, and what carries, resets, gates and refuses."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.modules.utils import get_primers_from_module

from edenrl.envs import PointMass, Quadruped
from edenrl.modules import DEPTH_STATES, DepthBackbone, DepthEncoder, DepthPolicy, DepthRefresh, DepthStudent, RMAActor

CLOSE = dict(atol=1e-5, rtol=1e-4)
WIDTHS = dict(prop=9, scan=11, priv_explicit=3, priv_latent=5, history=90)
GOLDEN = "depth"
# The reference's layers, in the order of construction.
LAYERS = ("conv0", "conv1", "fc0", "fc1", "comb0", "comb1", "gru", "out")


@pytest.fixture
def reference(golden):
    """The encoder with the weights of the reference: PyTorch's own initialization from a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(int(golden["cfg_seed"]))
        return DepthEncoder(
            int(golden["cfg_num_prop"]), yaw_slots=golden["cfg_yaw_slots"].tolist(), yaw_scale=golden["cfg_yaw_scale"]
        )


def small_encoder(**options):
    return DepthEncoder(9, **{**dict(image=(12, 14), latent=4, hidden=8), **options})


def small_student(**options):
    teacher = RMAActor(WIDTHS, 2, hidden=(16,), scan_hidden=(8, 4), priv_hidden=(8, 6))
    return DepthStudent(teacher, small_encoder(**options))


def entries(rows=3):
    """prop, history, depth and the mark of a new image."""
    return torch.randn(rows, 9), torch.randn(rows, 90), torch.randn(rows, 12, 14), torch.ones(rows, 1)


def observed(policy, rows=3):
    """What a policy with the usual groups reads at the first step of an episode."""
    prop, history, depth, new = entries(rows)
    td = TensorDict(dict(prop=prop, prop_history=history, depth=depth, depth_new=new), batch_size=[rows])
    return td.update(dict(zip(DEPTH_STATES, policy.module.start(rows), strict=True)))


def test_weights_are_those_of_the_recipe(golden, reference):
    ours = list(reference.parameters())
    names = [name for name in golden.names if name.startswith("check_")]
    assert [name.split("_")[1] for name in names] == [n for n in LAYERS for _ in range(4 if n == "gru" else 2)]
    for name, parameter in zip(names, ours, strict=True):
        total = torch.stack([parameter.double().sum(), parameter.double().abs().sum()]).detach()
        torch.testing.assert_close(total, golden[name].double(), rtol=1e-6, atol=1e-3)


def test_backbone_reproduces_the_reference(golden, reference):
    torch.testing.assert_close(reference.backbone(golden["images"]), golden["backbone_latent"], **CLOSE)
    assert reference.backbone(golden["images"][0, 0]).shape == (32,)


def test_encoder_reproduces_the_reference_over_three_images(golden, reference):
    count, rows = golden["prop_raw"].shape[:2]
    hidden, seen = reference.start(rows), {}
    reference.combine.register_forward_hook(lambda _, given, out: seen.update(given=given[0], combined=out))
    reference.out.register_forward_hook(lambda _, __, out: seen.update(output=out))
    for step in range(count):
        latent, yaw, hidden = reference(golden["images"][step], golden["prop_raw"][step], hidden)
        proprioception = golden["prop_in"][step]
        assert torch.equal(seen["given"][:, -proprioception.shape[-1] :], proprioception)
        for name in ("combined", "output"):
            torch.testing.assert_close(seen[name], golden[name][step], **CLOSE)
        torch.testing.assert_close(hidden, golden["hidden"][step], **CLOSE)
        torch.testing.assert_close(latent, golden["depth_latent"][step], **CLOSE)
        torch.testing.assert_close(yaw, golden["yaw_pred"][step], **CLOSE)


def test_the_encoder_does_not_read_the_yaw_slots():
    encoder, (prop, _, depth, _) = small_encoder(), entries()
    other = prop.clone()
    other[:, 6:8] = 5.0
    for one, two in zip(encoder(depth, prop, encoder.start(3)), encoder(depth, other, encoder.start(3)), strict=True):
        assert torch.equal(one, two)


def test_images_and_slots_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"image=\(58, 9\)"):
        DepthBackbone((58, 9))
    with pytest.raises(ValueError, match=r"\(2, 60, 106\) were given; expected \(\*batch, 58, 87\)"):
        DepthBackbone()(torch.zeros(2, 60, 106))


@pytest.mark.parametrize("slots", [(8, 10), (-1, 1), (6, 7), (6, 9), (7, 6), (9, 11)])
def test_yaw_slots_are_two_entries_inside_prop(slots):
    with pytest.raises(ValueError, match=r"a start and a stop, two apart, .* 9 entries of prop"):
        small_encoder(yaw_slots=slots)
    for fitting in ((0, 2), (7, 9)):
        assert small_encoder(yaw_slots=fitting).yaw_slots == fitting


@pytest.mark.parametrize("scale", [0.0, -1.5, float("nan"), float("inf")])
def test_the_yaw_scale_is_a_positive_angle(scale):
    with pytest.raises(ValueError, match="yaw_scale="):
        small_encoder(yaw_scale=scale)


@pytest.mark.parametrize(("slots", "scale"), [((0, 2), 0.7), ((3, 5), 3.0)])
def test_slots_and_scale_are_those_that_were_given(slots, scale):
    encoder, (prop, _, depth, _) = small_encoder(yaw_slots=slots, yaw_scale=scale), entries()
    other = prop.clone()
    other[:, slots[0] : slots[1]] += 1.0
    out, again = (encoder(depth, given, encoder.start(3)) for given in (prop, other))
    assert all(torch.equal(one, two) for one, two in zip(out, again, strict=True))
    torch.testing.assert_close(out[1], scale * encoder.out(out[2])[:, -2:])
    student = DepthStudent(RMAActor(WIDTHS, 2, hidden=(16,), scan_hidden=(8, 4), priv_hidden=(8, 6)), encoder)
    history, latent, yaw = torch.randn(3, 90), torch.randn(3, 4), torch.randn(3, 2)
    assert torch.equal(student.act(prop, history, latent, yaw), student.act(other, history, latent, yaw))


# The student


def test_the_student_starts_as_the_teacher():
    """With the true latent, the true angles and no angles in the history it acts as the teacher does."""
    student, (prop, history, _, gate) = small_student(), entries()
    history.view(3, 10, 9)[..., 6:8] = 0.0
    scan = torch.randn(3, 11)
    latent = student.actor.scan_encoder(scan)
    expected = student.actor(prop, scan, history=history, latent="history", estimated=True)[0]
    torch.testing.assert_close(student.act(prop, history, latent, prop[:, 6:8]), expected, rtol=0, atol=1e-7)
    gated = student.act(prop, history, latent, 0 * prop[:, 6:8], gate=0 * gate)
    torch.testing.assert_close(gated, expected, rtol=0, atol=0)


def test_yaw_is_the_prediction_where_the_gate_is_open_and_never_the_history():
    student, (prop, history, _, gate) = small_student(), entries()
    gate[0] = 0.5
    latent, yaw = torch.randn(3, 4), torch.randn(3, 2)
    action = student.act(prop, history, latent, yaw, gate)
    other = prop.clone()
    other[:, 6:8] += 1.0
    moved = (student.act(other, history, latent, yaw, gate) - action).abs().amax(1)
    assert moved[0] > 0 and not moved[1:].any()
    moved = (student.act(prop, history, latent, yaw + 1.0, gate) - action).abs().amax(1)
    assert moved[0] == 0 and moved[1:].all()
    history.view(3, 10, 9)[..., 6:8] += 1.0
    assert torch.equal(student.act(prop, history, latent, yaw, gate), action)


@pytest.mark.parametrize("rows", [1, 4])
def test_without_a_gate_the_yaw_is_always_the_prediction(rows):
    student, (prop, history, depth, new) = small_student(), entries(rows)
    other = prop.clone()
    other[:, 6:8] += torch.randn(rows, 2)
    state = tuple(torch.randn(rows, part.shape[1]) for part in student.start(1))
    for module in (student, student.export_module()):
        for mark in (new, 0 * new):
            outs = [module(given, history, depth, mark, *state) for given in (prop, other)]
            assert all(torch.equal(one, two) for one, two in zip(*outs, strict=True))


@pytest.mark.parametrize(("seed", "rows"), [(0, 3), (5, 2)])
def test_environments_that_differ_in_the_true_yaw_alone_see_the_same_actions(seed, rows):
    """The gate is closed all the time, the policy does not learn of it."""
    torch.manual_seed(seed)
    policy = DepthPolicy(small_student())
    policy.module.updates += 1
    policy.eval()
    actions, shift = {}, torch.randn(rows, 2)
    for truth in ("one", "other"):
        torch.manual_seed(seed)
        td, taken = observed(policy, rows).set("delta_yaw_ok", torch.zeros(rows, 1)), []
        for step in range(11):
            fresh = observed(policy, rows).exclude(*DEPTH_STATES)
            td.update(fresh.set("depth_new", torch.full((rows, 1), float(step % 5 == 0))))
            if truth == "other":
                td["prop"][:, 6:8] += shift
                td["prop_history"].view(rows, 10, 9)[..., 6:8] += shift[:, None]
            td = policy(td)
            taken.append(td["action"])
            td = td.update(td["next"]).exclude("next")
        actions[truth] = torch.stack(taken)
    assert actions["one"].abs().min() > 0 and torch.equal(actions["one"], actions["other"])


def test_what_the_action_trains():
    student, (prop, history, _, gate) = small_student(), entries()
    latent, yaw = torch.randn(3, 4, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    student.act(prop, history, latent, yaw, gate).sum().backward()
    assert latent.grad.abs().sum() > 0 and yaw.grad is None
    reached = {name.split(".")[0] for name, p in student.actor.named_parameters() if p.grad is not None}
    assert reached == {"backbone", "history_encoder"}
    assert reached == {name.split(".")[0] for name, p in student.actor.named_parameters() if p.requires_grad}


def test_the_student_is_a_copy():
    teacher = RMAActor(WIDTHS, 2, hidden=(16,), scan_hidden=(8, 4), priv_hidden=(8, 6))
    student = DepthStudent(teacher, small_encoder())
    assert not {p.data_ptr() for p in teacher.parameters()} & {p.data_ptr() for p in student.parameters()}
    assert all(p.requires_grad for p in teacher.parameters())


@pytest.mark.parametrize(
    ("widths", "encoder", "message"),
    [
        ({**WIDTHS, "scan": 0}, {}, "reads no scan"),
        (WIDTHS, dict(latent=5), "a scan latent of 4 numbers; the encoder was built for 9 and 5"),
        ({**WIDTHS, "prop": 10, "history": 100}, {}, "a prop of 10"),
    ],
)
def test_a_teacher_of_another_architecture_is_refused(widths, encoder, message):
    teacher = RMAActor(widths, 2, hidden=(16,), scan_hidden=(8, 4), priv_hidden=(8, 6))
    with pytest.raises(ValueError, match=message):
        DepthStudent(teacher, small_encoder(**encoder))


def test_only_rows_with_a_new_image_see():
    student = small_student()
    prop, history, depth, new = entries()
    new[1] = 0.0
    state = tuple(torch.randn(3, part.shape[1]) for part in student.start(1))
    after = student(prop, history, depth, new, *state)[1:]
    for part, old in zip(after, state, strict=True):
        assert torch.equal(part[1], old[1]) and (part[[0, 2]] != old[[0, 2]]).all()
    seen = student.encoder(depth, prop, state[0])
    torch.testing.assert_close(after[0][0], seen[2][0])
    torch.testing.assert_close(after[1][2], seen[0][2])


def test_the_encoder_rests_between_images(monkeypatch):
    student = small_student()
    monkeypatch.setattr(student.encoder, "forward", lambda *args: pytest.fail("the encoder ran"))
    prop, history, depth, new = entries()
    out = student(prop, history, depth, 0 * new, *student.start(3))
    assert not any(part.any() for part in out[1:])


def test_an_untrained_student_refuses_to_act_in_evaluation():
    student = small_student().eval()
    with pytest.raises(ValueError, match="never updated"):
        student(*entries(), *student.start(3))
    student.updates += 1
    assert student(*entries(), *student.start(3))[0].shape == (3, 2)
    fresh = small_student().eval()
    fresh.load_state_dict(student.state_dict())  # a checkpoint knows
    assert torch.equal(fresh.updates, torch.tensor(1))


# The policy in an environment


def test_policy_reads_and_writes_what_it_says():
    policy = DepthPolicy(small_student(), dict(history="frames", depth=("camera", "depth")), update_interval=3)
    prop, history, depth, new = entries()
    td = TensorDict(
        {"prop": prop, "frames": history, "camera": {"depth": depth}, "depth_new": new},
        batch_size=[3],
    )
    td.update(dict(zip(DEPTH_STATES, policy.module.start(3), strict=True)))
    out = policy(td)
    assert out["action"].shape == (3, 2)
    assert [out["next", name].shape[1] for name in DEPTH_STATES] == [8, 4, 2]
    for unknown in ("frames", "gate"):
        with pytest.raises(ValueError, match=rf"\['{unknown}'\]; a DepthPolicy reads \['prop', 'history', 'depth'\]"):
            DepthPolicy(small_student(), {unknown: "x"})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("group", "row"), [("prop", 0), ("prop_history", 2), ("depth", 1)])
def test_what_is_not_finite_is_named_before_it_enters_the_memory(group, row, bad):
    policy = DepthPolicy(small_student())
    td = observed(policy)
    td[group][row].view(-1)[3] = bad
    with pytest.raises(ValueError, match=rf"'{group}' holds -?(nan|inf) at row {row} "):
        policy(td)
    td["step_count"] = torch.tensor([[4], [5], [6]])  # as wrap_env counts
    with pytest.raises(ValueError, match=rf"'{group}' holds .* at row {row}, step {4 + row} "):
        policy(td)
    if group == "depth" and bad != bad:
        td["depth_new"][row] = 0.0  # an old image is not read
        assert policy(td)["action"].isfinite().all()


def test_refresh_marks_exactly_the_new_images():
    env = Quadruped(3, groups=["prop", "depth"], seed=0, num_threads=1)
    env.max_steps = 7  # resets fall between images
    env = TransformedEnv(env, DepthRefresh(5))
    td = env.reset()
    for step in range(22):
        assert (td["depth_new"] == float(step % 5 == 0)).all()
        stepped, after = env.step_and_maybe_reset(td.set("action", torch.randn(3, 12)))
        ended = stepped["next", "done"][:, 0]
        assert ended.any() == (step % 7 == 6)
        changed = (after["depth"] != td["depth"]).flatten(1).any(1)
        assert torch.equal(changed[~ended], (after["depth_new"] > 0.5)[~ended, 0])
        td = after
    assert (env.reset()["depth_new"] == 1).all()


def test_refresh_survives_its_state_dict():
    env = TransformedEnv(Quadruped(1, groups=["depth"], seed=0, num_threads=1), DepthRefresh())
    env.rollout(3)
    other = DepthRefresh()
    other.load_state_dict(env.transform.state_dict())
    assert int(other.steps) == 3


def test_refresh_refuses_another_cadence():
    with pytest.raises(ValueError, match=r"every update_interval=4 steps; Quadruped makes a new image every 5"):
        TransformedEnv(Quadruped(1, groups=["depth"], seed=0, num_threads=1), DepthRefresh(4))
    with pytest.raises(ValueError, match="PointMass does not declare depth_interval"):
        TransformedEnv(PointMass(1), DepthRefresh(5))


def test_primers_start_episodes_from_zero():
    policy = DepthPolicy(small_student())
    env = TransformedEnv(Quadruped(2, groups=["depth"], seed=0, num_threads=1))
    env.append_transform(get_primers_from_module(policy))
    td = env.reset()
    assert [td[name].shape for name in DEPTH_STATES] == [(2, 8), (2, 4), (2, 2)]
    assert not any(td[name].any() for name in DEPTH_STATES)
