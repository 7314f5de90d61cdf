"""What the spec says about environment, observations and actions."""

import json
import re

import pytest
import torch
from pydantic import ValidationError
from torchrl.data import Bounded, Composite, MultiCategorical, Unbounded
from torchrl.envs import (
    ActionScaling,
    CatTensors,
    Compose,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    TransformedEnv,
)

from edenrl.envs import ClipAction, GymVectorEnv, PointMass, make_env, wrap_env
from edenrl.envs.quadruped import GROUPS, JOINT_NAMES, RANDOMIZATION
from edenrl.export import EnvContract, PolicySpec, export_policy, load_policy, nominal_env
from edenrl.modules import gaussian_actor, make_actor, observation_groups


def spec_of(env, folder, **kwargs):
    policy = make_actor(observation_groups(env.observation_spec), env.action_spec_unbatched, hidden=(8,))
    export_policy(policy, env, folder, formats=["jit"], **kwargs)
    return PolicySpec.model_validate_json((folder / "policy_spec.json").read_text())


def test_point_mass_is_described_in_full(tmp_path):
    spec = spec_of(PointMass(2), tmp_path)
    (group,) = spec.observations
    assert (group.key, group.start, group.stop, group.width, group.shape) == ("observation", 0, 14, 14, [14])
    assert [(term.name, term.width) for term in group.terms][:2] == [("position", 2), ("velocity", 2)]
    assert sum(term.width for term in group.terms) == 14
    assert spec.rate.control_dt == pytest.approx(1 / 60) and spec.rate.decimation == 1
    assert (spec.actions.low, spec.actions.high, spec.actions.clip) == ([-1.0, -1.0], [1.0, 1.0], True)
    # v <- v (1 - 5 dt) + 5 a dt: one unit of action is 5 m/s^2.
    assert (spec.actions.scale, spec.actions.bias, spec.actions.unit) == ([5.0, 5.0], [0.0, 0.0], "m/s^2")


def test_half_cheetah_names_its_joints(tmp_path):
    pytest.importorskip("mujoco")
    spec = spec_of(make_env("HalfCheetah-v5", 2, seed=0), tmp_path)
    joints = ["rootx", "rootz", "rooty", "bthigh", "bshin", "bfoot", "fthigh", "fshin", "ffoot"]
    assert [(e.name, e.joint_names, e.default_positions) for e in spec.entities] == [("cheetah", joints, [0.0] * 9)]
    assert spec.actions.names == joints[3:] and spec.actions.dim == 6 and spec.actions.clip
    # half_cheetah.xml: timestep 0.01, five of them per action.
    assert spec.rate.model_dump() == {"control_dt": 0.05, "decimation": 5, "sim_dt": 0.01}


def test_gymnasium_tells_what_it_knows(tmp_path):
    pendulum = spec_of(wrap_env(make_env("Pendulum-v1", 2, seed=0)), tmp_path / "pendulum")
    assert (pendulum.rate.control_dt, pendulum.rate.sim_dt) == (0.05, None)
    assert (pendulum.actions.low, pendulum.actions.high, pendulum.actions.clip) == ([-2.0], [2.0], True)
    cart_pole = spec_of(make_env("CartPole-v1", 2, seed=0), tmp_path / "cart-pole")
    assert cart_pole.rate.control_dt == 0.02
    assert (cart_pole.actions.kind, cart_pole.actions.dim, cart_pole.actions.scale) == ("discrete", 2, None)
    assert cart_pole.model.outputs[0].model_dump() == {"name": "actions", "dtype": "int64", "shape": ["batch"]}


@pytest.mark.parametrize(
    ("mode", "limit", "low", "high", "clip", "others"),
    [
        ("clip", 0.5, [-0.5, 0.0], [0.5, 0.5], True, []),
        ("clip", 100, [-2.0, 0.0], [5.0, 1.0], True, []),
        ("squash", 100, [-2.0, 0.0], [5.0, 1.0], None, ["ClipAction(limit=100.0)"]),
        ("none", 0.5, [-2.0, 0.0], [5.0, 1.0], None, ["ClipAction(limit=0.5)"]),
    ],
)
def test_numeric_clips_are_stated(tmp_path, mode, limit, low, high, clip, others):
    env = PointMass(2)
    env.policy_contract = lambda: {}  # whether the simulator clips by itself is not known
    env.action_spec = Bounded(torch.tensor([[-2.0, 0.0]] * 2), torch.tensor([[5.0, 1.0]] * 2), (2, 2))
    actions = spec_of(wrap_env(env, action_mode=mode, clip_actions=limit), tmp_path).actions
    assert (actions.low, actions.high, actions.clip, actions.transforms) == (low, high, clip, others)


@pytest.mark.parametrize(("box", "limit"), [(None, 0.1), (None, 100), (3.0, 1.5)])
def test_a_numeric_clip_inside_the_box_is_the_box(tmp_path, box, limit):
    env = PointMass(2)
    env.policy_contract = lambda: {}
    env.action_spec = Unbounded((2, 2)) if box is None else Bounded(-box, box, (2, 2))
    actions = spec_of(wrap_env(env, action_mode="none", clip_actions=limit), tmp_path).actions
    assert (actions.low, actions.high) == ([-limit] * 2, [limit] * 2)
    assert actions.clip and not actions.transforms


@pytest.mark.parametrize("declared", [{}, {"rate": {"control_dt": 0.02}}, {"actions": {"names": ["x", "y"]}}])
def test_what_is_not_declared_is_not_invented(tmp_path, declared):
    env = PointMass(2)
    env.policy_contract = lambda: declared
    actions = spec_of(env, tmp_path).actions
    assert (actions.scale, actions.bias, actions.clip) == (None, None, None)
    # A scaling around an unknown one is unknown as well, and said to be there.
    scaling = ActionScaling(loc=torch.tensor([0.5, 0.0]), scale=torch.tensor([2.0, 4.0]))
    actions = spec_of(TransformedEnv(env, Compose(scaling, ClipAction())), tmp_path).actions
    assert (actions.scale, actions.bias, actions.transforms) == (None, None, ["ActionScaling"])
    assert (actions.low, actions.high, actions.clip) == ([-0.75, -0.25], [0.25, 0.25], True)


def test_a_gymnasium_wrapper_around_the_actions_leaves_them_undeclared(tmp_path):
    pytest.importorskip("mujoco")
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    def rescaled():
        return gymnasium.wrappers.RescaleAction(gymnasium.make("Hopper-v5"), -0.5, 0.5)

    actions = spec_of(make_env("Hopper-v5", 2, seed=0), tmp_path / "plain").actions
    assert (actions.scale, actions.bias, actions.clip) == ([1.0] * 3, [0.0] * 3, True)
    env = GymVectorEnv(SyncVectorEnv([rescaled] * 2, autoreset_mode=AutoresetMode.DISABLED))
    actions = spec_of(env, tmp_path / "wrapped").actions
    assert (actions.scale, actions.bias, actions.clip, actions.names) == (None, None, None, None)


OWN = ("PointMass", "HiddenPointMass", "ConflictPointMass", "CartPoleSwingUp", "Quadruped", "QuadrupedTerrain")


def test_none_of_our_environments_is_left_out(built_in_environments):
    assert set(OWN) == built_in_environments


@pytest.mark.parametrize("name", OWN)
def test_our_environments_declare_every_group_they_publish(name):
    options = {}
    if name.startswith("Quadruped"):
        pytest.importorskip("mujoco", minversion="3.17")
        options = dict(groups=GROUPS, history_length=3, prop_history_length=4, num_threads=1)
    env = make_env(name, 2, seed=0, **options)
    contract = EnvContract.model_validate(nominal_env(env).policy_contract())
    specs = {key: leaf for key, leaf in env.observation_spec.items(True, True) if isinstance(key, str)}
    shapes = {key: leaf.shape[1:] for key, leaf in specs.items()}
    for key in ("critic", "priv_explicit", "priv_latent"):
        if name == "HiddenPointMass":
            del shapes[key]  # of the simulation, which no deployment has
    assert set(contract.observations) >= set(shapes)
    for key, shape in shapes.items():
        frames = contract.histories[key].frames if key in contract.histories else 1
        assert sum(term.width for term in contract.observations[key]) * frames == shape.numel(), key
    assert contract.rate.control_dt and contract.actions.names and contract.actions.meaning
    assert (contract.actions.scale is None) == (name == "HiddenPointMass")
    assert not contract.randomized


@pytest.mark.parametrize("name", ["Quadruped", "QuadrupedTerrain"])
def test_the_quadruped_tells_what_moves_it(tmp_path, name):
    pytest.importorskip("mujoco", minversion="3.17")
    spec = spec_of(nominal_env(make_env(name, 2, seed=0, num_threads=1)), tmp_path)
    assert spec.actions.scale == [0.25] * 12 and spec.actions.bias == [0.0, 0.88, -1.58] * 4
    assert (spec.actions.low, spec.actions.high, spec.actions.clip) == ([-4.0] * 12, [4.0] * 12, True)
    (robot,) = spec.entities
    assert robot.joint_names == spec.actions.names == list(JOINT_NAMES)
    assert robot.default_positions == [0.0, 0.88, -1.58] * 4
    assert (robot.stiffness, robot.damping) == ([40.0] * 12, [1.0] * 12)
    assert robot.effort_limits == [24.0, 24.0, 36.0] * 4
    assert spec.rate.model_dump() == {"control_dt": 0.02, "decimation": 4, "sim_dt": 0.005}


@pytest.mark.parametrize(
    ("randomize", "names"),
    [
        (True, ["motor_strength", "kp", "kd", "joint_offset"]),
        ({"friction": [0.2, 0.3], "push": [0.0, 0.0], "kp": [1.0, 1.0], "joint_offset": [0.0, 0.0]}, None),
        (False, []),
    ],
)
def test_a_quadruped_with_random_motors_has_no_single_spec(tmp_path, randomize, names):
    pytest.importorskip("mujoco", minversion="3.17")
    names = ["motor_strength", "kd"] if names is None else names
    env = make_env("Quadruped", 3, seed=7, num_threads=1, randomize=randomize)
    assert env.policy_contract()["randomized"] == names
    if names:
        with pytest.raises(ValueError, match="Quadruped randomizes .* Export with nominal_env"):
            spec_of(env, tmp_path)
    nominal_env(env)
    # Also in the episodes under way, and in those to come.
    for _ in range(2):
        for row in range(3):
            model, _ = env.simulation(row)
            assert model.actuator_gainprm[:, 0].tolist() == [40.0] * 12
            assert model.actuator_biasprm[:, 2].tolist() == [-1.0] * 12
            assert model.actuator_forcerange[:, 1].tolist() == [24.0, 24.0, 36.0] * 4
        env.reset()
    assert not env._rows.joint_offset.any()


def test_a_fixed_parameter_is_part_of_the_spec(tmp_path):
    pytest.importorskip("mujoco", minversion="3.17")
    fixed = {name: [low, low] for name, (low, _) in RANDOMIZATION.items()}
    fixed |= {"kp": [0.5, 0.5], "kd": [2.0, 2.0], "motor_strength": [0.8, 0.8], "joint_offset": [0.1, 0.1]}
    env = make_env("Quadruped", 2, seed=0, num_threads=1, randomize=fixed)
    spec = spec_of(nominal_env(env), tmp_path)
    model, _ = env.simulation(0)
    assert spec.entities[0].stiffness == pytest.approx(model.actuator_gainprm[:, 0].tolist())
    assert spec.entities[0].damping == pytest.approx((-model.actuator_biasprm[:, 2]).tolist())
    assert spec.entities[0].effort_limits == pytest.approx(model.actuator_forcerange[:, 1].tolist())
    assert spec.actions.bias == pytest.approx([0.1, 0.98, -1.48] * 4)


class Arm(PointMass):
    """A robot that declares everything, and randomizes some of it."""

    randomized: tuple = ()

    def policy_contract(self):
        return {
            "observations": {"observation": [{"name": "all", "width": 14}]},
            "actions": {"scale": [0.25, 0.5], "bias": [0.1, -0.2], "names": ["hip", "knee"], "unit": "rad"},
            "rate": {"control_dt": 0.02, "decimation": 4, "sim_dt": 0.005},
            "entities": [
                {
                    "name": "arm",
                    "joint_names": ["hip", "knee"],
                    "default_positions": [0.1, -0.2],
                    "stiffness": [20.0, 25.0],
                    "damping": [0.5, 0.6],
                }
            ],
            "randomized": list(self.randomized),
        }


def test_what_an_environment_declares_is_written(tmp_path):
    spec = spec_of(Arm(2), tmp_path)
    assert spec.entities[0].stiffness == [20.0, 25.0] and spec.rate.decimation == 4
    assert (spec.actions.scale, spec.actions.bias, spec.actions.names) == ([0.25, 0.5], [0.1, -0.2], ["hip", "knee"])
    assert not spec.actions.clip


def test_scaling_transforms_are_composed(tmp_path):
    """The command is what the simulator would have received: worked out for one action."""
    env = TransformedEnv(Arm(2))
    env.append_transform(ActionScaling(loc=torch.tensor([0.5, 0.0]), scale=torch.tensor([2.0, 4.0])))
    env.append_transform(ClipAction())
    actions = spec_of(env, tmp_path).actions
    # Simulator: 0.1 + 0.25 (0.5 + 2 a) = 0.225 + 0.5 a and -0.2 + 0.5 (4 a) = -0.2 + 2 a.
    torch.testing.assert_close(actions.scale, [0.5, 2.0])
    torch.testing.assert_close(actions.bias, [0.225, -0.2])
    # Its box [-1, 1] as the policy sees it: (-1 - 0.5) / 2 and (1 - 0.5) / 2, +-1 / 4.
    assert (actions.low, actions.high, actions.clip) == ([-0.75, -0.25], [0.25, 0.25], True)


def test_half_open_boxes_have_null_bounds(tmp_path):
    env = PointMass(2)
    env.policy_contract = dict
    low, high = torch.tensor([[-1.0, -torch.inf]] * 2), torch.tensor([[torch.inf, 0.4]] * 2)
    env.action_spec = Bounded(low, high)
    actions = spec_of(env, tmp_path).actions
    assert (actions.low, actions.high, actions.clip) == ([-1.0, None], [None, 0.4], None)
    env.action_spec = Unbounded((2, 2))
    assert spec_of(env, tmp_path).actions.low is None


class Randomized(Arm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.randomized = ("default_positions", "action bias")

    def set_nominal(self):
        self.randomized = ()


def test_randomized_contract_values_are_refused_or_switched_off(tmp_path):
    env = wrap_env(Randomized(2))
    with pytest.raises(ValueError, match=r"Randomized randomizes \['default_positions', 'action bias'\].*nominal_env"):
        spec_of(env, tmp_path)
    assert not (tmp_path / "policy_spec.json").exists()
    assert nominal_env(env) is env
    spec_of(env, tmp_path)

    class Stubborn(Randomized):
        def set_nominal(self):
            self.randomized = ("mass",)

    with pytest.raises(ValueError, match=r"Stubborn.set_nominal\(\) left \['mass'\] randomized"):
        nominal_env(Stubborn(2))
    arm = Arm(2)
    arm.randomized = ("gains",)
    with pytest.raises(ValueError, match=r"Arm randomizes \['gains'\] and has no set_nominal\(\)"):
        nominal_env(arm)


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        ({"observation": {}}, "PointMass.policy_contract.. is not a valid EnvContract"),
        ({"observations": {"observation": [{"name": "all", "width": 13}]}}, "lists 13 features .* which has 14"),
        ({"actions": {"scale": [1.0] * 2}}, "actions.scale and actions.bias belong together"),
        (
            {"observations": {"observation": [{"name": "all", "width": 14, "scale": [1.0]}]}},
            "1 factors in scale for 14",
        ),
        (
            {"histories": {"observation": {"frames": 3, "order": "oldest_first"}}},
            "14 features, no multiple of the 3 frames",
        ),
        (
            {
                "observations": {"observation": [{"name": "all", "width": 5}]},
                "histories": {"observation": {"frames": 2, "order": "oldest_first"}},
            },
            "lists 5 features a frame, in 2 frames, for 'observation', which has 14",
        ),
        (
            {"actions": {"scale": [1.0], "bias": [0.0]}},
            "declares actions with {'scale': 1, 'bias': 1} entries; the action has 2",
        ),
        ({"entities": [{"name": "arm", "joint_names": ["a", "b"], "damping": [1.0]}]}, "damping has 1 values for 2"),
        ({"rate": {"control_dt": float("nan")}}, "finite"),
    ],
)
def test_wrong_declarations_are_refused(tmp_path, contract, message):
    env = PointMass(2)
    env.policy_contract = lambda: contract
    with pytest.raises(ValueError, match=message):
        spec_of(env, tmp_path)


def test_a_normalizer_outside_the_policy_is_refused(tmp_path):
    env = TransformedEnv(PointMass(2), ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"]))
    with pytest.raises(ValueError, match="ObservationNorm normalizes 'observation'; an exported policy would miss it"):
        spec_of(env, tmp_path)


def test_a_normalizer_further_in_is_refused(tmp_path):
    policy = gaussian_actor({"all": 14}, 2, hidden=(8,))
    for nest in (lambda *t: Compose(*t), lambda *t: Compose(Compose(*t))):
        norm = ObservationNorm(loc=1.0, scale=2.0, in_keys=["observation"])
        env = TransformedEnv(PointMass(2), nest(norm, CatTensors(["observation"], "all", del_keys=False)))
        with pytest.raises(ValueError, match="ObservationNorm normalizes 'all'"):
            export_policy(policy, env, tmp_path, formats=["jit"])
    inside = SerialEnv(2, lambda: TransformedEnv(PointMass(1), ObservationNorm(1.0, 2.0, in_keys=["observation"])))
    with pytest.raises(ValueError, match="ObservationNorm normalizes 'observation'"):
        export_policy(gaussian_actor({"observation": 14}, 2, hidden=(8,)), inside, tmp_path, formats=["jit"])


def test_nested_action_scaling_is_recorded(tmp_path):
    scaling = ActionScaling(loc=torch.zeros(2), scale=torch.full((2,), 0.5))
    assert spec_of(TransformedEnv(PointMass(2), Compose(Compose(scaling))), tmp_path).actions.scale == [2.5, 2.5]


def test_serial_environments_are_looked_into(tmp_path):
    policy = gaussian_actor({"observation": 14}, 2, hidden=(8,))
    env = SerialEnv(2, lambda: PointMass(1))
    export_policy(policy, nominal_env(env), tmp_path, formats=["jit"])
    spec = PolicySpec.model_validate_json((tmp_path / "policy_spec.json").read_text())
    assert (spec.actions.scale, spec.actions.clip) == ([5.0, 5.0], True)
    with pytest.raises(ValueError, match="ParallelEnv keeps its environments in other processes"):
        nominal_env(ParallelEnv(2, lambda: PointMass(1)))


def test_images_keep_their_shape(tmp_path):
    class Seeing(PointMass):
        def _make_specs(self):
            super()._make_specs()
            self.observation_spec = Composite(
                self.observation_spec, depth=Unbounded((*self.batch_size, 3, 4)), shape=self.batch_size
            )

        def _observe(self):
            out = super()._observe()
            return out.set("depth", torch.arange(12.0).reshape(3, 4).expand(*self.batch_size, 3, 4).clone())

    class Looking(torch.nn.Module):
        def forward(self, depth, observation):
            return torch.stack([depth[..., 1, 2], depth[..., 2, 1] + observation[..., 0]], -1)

    from tensordict.nn import TensorDictModule

    policy = TensorDictModule(Looking(), in_keys=["depth", "observation"], out_keys=["action"])
    policy.register_parameter("unused", torch.nn.Parameter(torch.zeros(1)))
    export_policy(policy, Seeing(2), tmp_path, formats=["onnx"])
    runtime = load_policy(tmp_path)
    assert [(o["key"], o["shape"], o["stop"]) for o in runtime.spec["observations"]] == [
        ("depth", [3, 4], 12),
        ("observation", [14], 26),
    ]
    # Row-major: row 1, column 2 is 6 and row 2, column 1 is 9.
    assert runtime([*range(12), *[100.0] * 14]).tolist() == [6.0, 109.0]


def test_a_stub_made_from_the_spec_alone_drives_the_task(tmp_path):
    """Rebuilds PointMass' motion from slices, bounds, scale and rate of the spec: 200 steps as in the library."""
    policy = gaussian_actor({"observation": 14}, 2, hidden=(16,))
    torch.nn.init.normal_(policy.module[0].module.mlp[-1].weight, std=2.0)
    env = PointMass(1, seed=4, max_steps=10_000)
    export_policy(policy, wrap_env(PointMass(2)), tmp_path, formats=["onnx"])
    runtime = load_policy(tmp_path)
    spec = runtime.spec
    starts, at = {}, 0
    for term in spec["observations"][0]["terms"]:
        starts[term["name"]] = slice(at, at + term["width"])
        at += term["width"]
    td = env.reset()
    obs = td["observation"][0].double().numpy()
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    deviation = 0.0
    dt, damping = spec["rate"]["control_dt"], float(re.search(r"damping by (\d+)/s", spec["actions"]["meaning"])[1])
    low, high, scale = (torch.tensor(spec["actions"][name]).double().numpy() for name in ("low", "high", "scale"))
    for _ in range(200):
        clipped = runtime(obs).astype(float).clip(low, high)
        velocity = obs[starts["velocity"]] * (1 - damping * dt) + scale * clipped * dt
        obs = obs.copy()
        obs[starts["position"]] = (obs[starts["position"]] + velocity * dt).clip(-1, 1)
        obs[starts["velocity"]], obs[starts["last action, clamped"]] = velocity, clipped
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            td = env.step(policy.eval()(td))["next"]
        deviation = max(deviation, float(abs(td["observation"][0].numpy() - obs).max()))
    assert deviation < 1e-4


def test_training_statistics_find_a_wrong_unit(tmp_path):
    """A gravity vector in m/s^2 where training had unit length; a NaN."""

    class Robot(PointMass):
        def policy_contract(self):
            terms = {"angular velocity": 3, "projected gravity": 3, "rest": 8}
            return {"observations": {"observation": [{"name": n, "width": w} for n, w in terms.items()]}}

    policy = gaussian_actor({"observation": 14}, 2, hidden=(8,))
    norm = policy.module[0].module.norm
    norm.mean.copy_(torch.tensor([0.0, 0, 0, 0, 0, -0.98, *[0.0] * 8]))
    norm.var.copy_(torch.tensor([4.0, 4, 4, 0.01, 0.01, 0.0004, *[1.0] * 8]))
    export_policy(policy, Robot(2), tmp_path, formats=["onnx"])
    runtime = load_policy(tmp_path)
    assert runtime.spec["observations"][0]["std"][:6] == [2.0, 2.0, 2.0, 0.1, 0.1, 0.02]
    usual = [1.0, -2, 0.5, 0.1, 0, -0.98, *[0.5] * 8]
    assert runtime.unusual(usual) == {}
    wrong = runtime.unusual([*usual[:5], -9.81, *usual[6:13], float("nan")])
    assert list(wrong) == ["observation/projected gravity[2]", "observation/rest[7]"]
    assert wrong["observation/projected gravity[2]"] == pytest.approx((9.81 - 0.98) / 0.03)


def test_a_policy_that_holds_nan_is_refused(tmp_path):
    policy = gaussian_actor({"observation": 14}, 2, hidden=(8,), normalize=False)
    with torch.no_grad():
        policy.module[0].module.mlp[-1].bias[0] = torch.nan
    with pytest.raises(ValueError, match="gives actions that are not finite"):
        export_policy(policy, PointMass(2), tmp_path, formats=["jit"])


def test_other_actions_are_refused_by_their_spec(tmp_path):
    env = PointMass(2)
    env.action_spec = MultiCategorical([2, 3], shape=(2, 2))
    policy = gaussian_actor({"observation": 14}, 2, hidden=(8,))
    with pytest.raises(TypeError, match="floating-point action vector or one discrete action to export, got MultiCat"):
        export_policy(policy, env, tmp_path, formats=["jit"])


def test_the_published_schema_is_that_of_the_model(root):
    """To renew it: python -c "from edenrl.export import PolicySpec as P; import json; print(json.dumps(
    P.model_json_schema(), indent=2))" > docs/pages/assets/policy_spec.schema.json.
    """
    published = json.loads((root / "docs" / "pages" / "assets" / "policy_spec.schema.json").read_text())
    assert published == PolicySpec.model_json_schema()


def test_the_specs_on_the_page_are_valid_and_explained(root):
    page = (root / "docs" / "pages" / "export.md").read_text()
    specs = [PolicySpec.model_validate_json(block) for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)]
    assert [spec.provenance.task for spec in specs] == ["PointMass", "HalfCheetah-v5"]

    def fields(schema):
        for part in [schema, *schema.get("$defs", {}).values()]:
            yield from part["properties"]

    unexplained = {name for name in fields(PolicySpec.model_json_schema()) if f"`{name}`" not in page}
    assert not unexplained


def test_a_spec_holds_no_unknown_fields():
    with pytest.raises(ValidationError):
        EnvContract(observation={})
