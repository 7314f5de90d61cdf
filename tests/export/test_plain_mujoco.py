"""The quadruped's exported policy in plain MuJoCo, with nothing but its ONNX file, its spec and the robot's XML."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

pytest.importorskip("onnxruntime")
mujoco = pytest.importorskip("mujoco", minversion="3.17")

from edenrl.envs import Quadruped, wrap_env  # noqa: E402
from edenrl.envs.quadruped import model_xml  # noqa: E402
from edenrl.export import export_policy, load_policy, nominal_env  # noqa: E402
from edenrl.modules import make_actor, observation_groups  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"


class Robot:
    """Knows MuJoCo and the spec: reads what the terms name, does with an action what the spec says."""

    def __init__(self, xml, spec):
        self.spec, self.model = spec, mujoco.MjModel.from_xml_string(xml)
        self.data = mujoco.MjData(self.model)
        (self.entity,) = spec["entities"]
        joints = [self.model.joint(name) for name in self.entity["joint_names"]]
        self.angles = [int(joint.qposadr[0]) for joint in joints]
        self.velocities = [int(joint.dofadr[0]) for joint in joints]
        self.servos = [self.model.actuator(name).id for name in spec["actions"]["names"]]
        assert self.model.opt.timestep == pytest.approx(spec["rate"]["sim_dt"])
        for servo, stiffness, damping in zip(
            self.servos, self.entity["stiffness"], self.entity["damping"], strict=True
        ):
            self.model.actuator_gainprm[servo, 0] = stiffness
            self.model.actuator_biasprm[servo, 1:3] = -stiffness, -damping
        self.command = np.zeros(3)
        self.last_action = None

    def start(self, qpos, qvel, command):
        mujoco.mj_resetData(self.model, self.data)
        self.data.qpos[:], self.data.qvel[:], self.command = qpos, qvel, np.asarray(command, float)
        self.last_action = None

    def measure(self, term):
        rotation = np.empty(9)
        mujoco.mju_quat2Mat(rotation, self.data.qpos[3:7])
        default = np.asarray(self.entity["default_positions"])
        values = {
            "command": self.command,
            "angular velocity": self.data.qvel[3:6],
            "gravity direction": -rotation.reshape(3, 3)[2],
            "joint angles from the default pose": self.data.qpos[self.angles] - default,
            "joint velocities": self.data.qvel[self.velocities],
            "last action": self.last_action,
        }
        value = values[term["name"]]
        if value is None:
            value = np.full(term["width"], term["at_reset"])
        return value * term["scale"]

    def frame(self, key):
        (group,) = [group for group in self.spec["observations"] if group["key"] == key]
        return np.concatenate([self.measure(term) for term in group["terms"]])

    def act(self, action):
        actions, rate = self.spec["actions"], self.spec["rate"]
        assert actions["clip"] and actions["unit"] == "rad"
        clipped = np.clip(action.astype(float), actions["low"], actions["high"])
        self.data.ctrl[self.servos] = np.asarray(actions["bias"]) + np.asarray(actions["scale"]) * clipped
        mujoco.mj_step(self.model, self.data, nstep=rate["decimation"])
        self.last_action = clipped


def random_policy(env, group, seed):
    """Large enough actions to move, small enough not to fall."""
    torch.manual_seed(seed)
    policy = make_actor(observation_groups(env.observation_spec, [group]), env.action_spec_unbatched, hidden=(32,))
    torch.nn.init.normal_(policy.module[0].module.mlp[-1].weight, std=0.3)
    return policy.eval()


@pytest.mark.parametrize(("group", "frames", "seed"), [("policy", 1, 5), ("policy", 1, 11), ("history", 4, 5)])
def test_plain_mujoco_moves_as_the_environment(tmp_path, group, frames, seed):
    options = dict(groups=[group], history_length=frames, num_threads=1)
    policy = random_policy(Quadruped(1, **options), group, seed)
    export_policy(policy, wrap_env(nominal_env(Quadruped(2, **options))), tmp_path, formats=["onnx"])
    runtime = load_policy(tmp_path)
    env = Quadruped(1, seed=seed, randomize=False, **options)
    td = env.reset()
    _, data = env.simulation(0)
    robot = Robot(model_xml(), runtime.spec)
    robot.start(data.qpos, data.qvel, env._rows.command[0])
    moved = 0.0
    for _ in range(50):
        obs = runtime.observe({group: robot.frame(group)})
        np.testing.assert_allclose(obs[group], td[group][0].numpy(), rtol=0, atol=1e-4)
        action = runtime(obs)
        robot.act(action)
        with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
            td = env.step(policy(td))["next"]
        assert not td["done"].any()
        state = env.simulation(0)[1]
        np.testing.assert_allclose(robot.data.qpos, state.qpos, rtol=0, atol=1e-4)
        moved = max(moved, float(np.abs(action).max()))
    assert moved > 0.5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a million frames on the quadruped, exported; some minutes on one core."""
    run = tmp_path_factory.mktemp("runs") / "robot"
    command = [sys.executable, EXAMPLES / "train_ppo.py", "--env.name", "Quadruped", "--quiet", "--export"]
    command += ["--total_frames", "1000000", "--num_threads", "1", "--run_dir", run]
    subprocess.run(command, check=True, capture_output=True)
    return run


@pytest.mark.slow
def test_a_trained_policy_walks_in_plain_mujoco_as_in_evaluation(trained):
    """Ten seconds each of several commands: no falls, and the speed of the library's own evaluation."""
    command = [sys.executable, EXAMPLES / "evaluate.py", trained, "--json", "--episodes", "32"]
    command += ["--kwargs", json.dumps({"randomize": False, "zero_commands": 0.0})]
    expected = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    runtime = load_policy(trained / "policy")
    robot = Robot(model_xml(), runtime.spec)
    stand = np.concatenate([[0, 0, 0.27, 1, 0, 0, 0], runtime.spec["entities"][0]["default_positions"]])
    errors = []
    for wanted in ([0.3, 0.0, 0.0], [0.6, 0.1, 0.2], [0.9, 0.0, -0.3], [0.5, -0.2, 0.0]):
        runtime.reset()
        robot.start(stand, np.zeros(18), wanted)
        velocities = []
        for _ in range(500):
            robot.act(runtime(runtime.observe({key: robot.frame(key) for key in runtime.groups})))
            rotation = np.empty(9)
            mujoco.mju_quat2Mat(rotation, robot.data.qpos[3:7])
            assert rotation.reshape(3, 3)[2, 2] > 0.5 and robot.data.qpos[2] > 0.16, f"fell over at {wanted}"
            velocities.append((rotation.reshape(3, 3).T @ robot.data.qvel[:3])[:2])
        errors += [np.hypot(*(velocity - wanted[:2])) for velocity in velocities[50:]]
    assert expected["fallen"] == 0.0
    assert np.mean(errors) == pytest.approx(expected["velocity_error"], abs=0.05)
