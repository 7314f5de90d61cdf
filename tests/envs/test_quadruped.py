from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import EnvBase

from edenrl.envs import Quadruped, QuadrupedTerrain
from edenrl.envs.quadruped import (
    DEFAULT_POSE,
    GROUPS,
    JOINT_NAMES,
    RANDOMIZATION,
    build_model,
    save_trot_clips,
    trot_clip,
)
from edenrl.envs.quadruped.simulation import _foot_positions

mujoco = pytest.importorskip("mujoco", minversion="3.17")

BOTH = [Quadruped, QuadrupedTerrain]


def make(num_envs: int, kind: type[Quadruped] = Quadruped, **kwargs: Any) -> Quadruped:
    return kind(num_envs, **{"seed": 0, "num_threads": 1, **kwargs})


def play(env: EnvBase, data: TensorDict, actions: torch.Tensor) -> tuple[list[TensorDict], TensorDict]:
    """Steps with partial resets; the transitions and the next root."""
    steps = []
    for action in actions:
        step, data = env.step_and_maybe_reset(data.set("action", action))
        steps.append(step)
    return steps, data


def put(env: Quadruped, **state: Any) -> None:
    """Overwrite parts of the simulation state ``qpos``, ``qvel``."""
    for name, value in state.items():
        getattr(env, f"_{name}")[:] = value


# ---- contract ------------------------------------------------------------------------------------------------------


def test_every_group_has_the_documented_width_and_only_named_groups_are_published() -> None:
    widths = {
        "policy": 45,
        "critic": 48,
        "history": 3 * 45,
        "prop": 53,
        "scan": 132,
        "priv_explicit": 9,
        "priv_latent": 29,
        "prop_history": 4 * 53,
        "amp_window": 60,
        "amp_gate": 1,
        "delta_yaw_ok": 1,
    }
    data = make(2, groups=GROUPS, history_length=3, prop_history_length=4).rollout(2)
    for root in (data, data["next"]):
        assert {key: root[key].shape[-1] for key in widths} == widths
        assert root["depth"].shape == (2, 2, 58, 87)
        assert set(root["reward_groups"].keys()) == {"task", "style", "penalty"}
        assert root["metrics", "velocity_error"].shape == (2, 2, 1)
    for group in GROUPS:
        keys = {"amp": {"amp_window", "amp_gate"}, "depth": {"depth", "delta_yaw_ok"}}.get(group, {group})
        published = make(1, groups=[group]).reset()
        assert set(published.keys()) == keys | {"done", "terminated", "truncated"}


@pytest.mark.parametrize("kind", BOTH)
def test_the_number_of_threads_changes_nothing(kind: type[Quadruped]) -> None:
    def run(threads: int) -> torch.Tensor:
        env = kind(3, seed=7, num_threads=threads, episode_seconds=0.2)
        torch.manual_seed(0)
        steps, _ = play(env, env.reset(), torch.rand(25, 3, 12) * 2 - 1)
        return torch.stack([step["next", "critic"] for step in steps])

    assert torch.equal(run(1), run(2))


def test_done_rows_keep_their_true_last_observation() -> None:
    env = make(2, groups=["policy", "critic", "metrics"], episode_seconds=0.1)
    steps, root = play(env, env.reset(), torch.zeros(5, 2, 12))
    end = steps[-1]["next"]
    assert end["truncated"].all() and not end["terminated"].any() and end["done"].all()
    assert not steps[-2]["next", "done"].any()
    # Its velocities are those of the joints on the way to the last angles; the new episode's are not.
    step = (end["policy"][:, 9:21] - steps[-1]["policy"][:, 9:21]) / 0.02
    assert (end["policy"][:, 21:33] / 0.05 - step).abs().max() < 0.5 * step.abs().max()
    assert (root["policy"][:, 9:21] - end["policy"][:, 9:21]).abs().min() > 0
    assert (root["policy"][:, 33:45] == 0).all() and (root["metrics", "distance"] == 0).all()
    assert (end["metrics", "success"] == 1).all()


@pytest.mark.parametrize(
    ("commands", "succeeds"),
    [
        ({"vx": [0.0, 0.0], "vy": [0.0, 0.0], "yaw": [0.0, 0.0]}, 1.0),
        ({"vx": [0.15, 0.15], "vy": [0.0, 0.0], "yaw": [0.0, 0.0]}, 1.0),
        ({"vx": [0.3, 0.3], "vy": [0.0, 0.0], "yaw": [0.0, 0.0]}, 0.0),
        ({"vx": [0.0, 0.0], "vy": [-0.25, -0.25], "yaw": [0.0, 0.0]}, 0.0),
        ({"vx": [0.0, 0.0], "vy": [0.0, 0.0], "yaw": [0.4, 0.4]}, 0.0),
    ],
)
@pytest.mark.parametrize("seed", [3, 11])
def test_success_is_to_follow_the_command_and_not_to_stand(
    commands: dict[str, Any], succeeds: float, seed: int
) -> None:
    groups = ["policy", "metrics"]
    env = make(3, seed=seed, groups=groups, episode_seconds=2.0, commands=commands, zero_commands=0.0)
    steps, _ = play(env, env.reset(), torch.zeros(100, 3, 12))
    end = steps[-1]["next"]
    assert end["truncated"].all() and (end["metrics", "success"] == succeeds).all()
    assert all((step["next", "metrics", "success"] == 0).all() for step in steps[:-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": ["polcy"]}, "choose from .*'policy'"),
        ({"commands": {"vz": [0, 1]}}, "commands names 'vz'"),
        ({"commands": {"vx": [1, 0]}}, r"vx=\[1, 0\]"),
        ({"randomize": {"mass": [0, 1]}}, "randomize names 'mass'"),
        ({"rewards": {"trt": 1.0}}, "rewards names .*'trt'"),
        ({"term_groups": {"trt": "style"}}, "term_groups names .*'trt'"),
        ({"term_groups": {"trot": "stile"}}, r"term_groups gives \{'trot': 'stile'\}.*'style'"),
    ],
)
def test_refuses_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quadruped(**{"num_envs": 1, **arguments})


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_refuses_an_action_that_is_not_finite(value: str) -> None:
    env = make(3)
    action = torch.zeros(3, 12)
    action[1, 4] = float(value)
    with pytest.raises(ValueError, match="action of env 1"):
        env.step(env.reset().set("action", action))


# ---- physics -------------------------------------------------------------------------------------------------------


def test_stands_for_five_seconds_without_action() -> None:
    env = make(4, randomize=False, commands={name: [0, 0] for name in ("vx", "vy", "yaw")})
    root = env.reset()
    put(env, qvel=0.0)
    env._qpos[:, 7:] = DEFAULT_POSE
    env._qpos[:, 2] = 0.318
    start = env._qpos[:, :2].copy()
    steps, _ = play(env, root, torch.zeros(250, 4, 12))
    assert not any(step["next", "done"].any() for step in steps)
    assert np.hypot(*(env._qpos[:, :2] - start).T).max() < 0.05
    # The height of the feasibility study in this state, with the same gains: 0.293 m.
    np.testing.assert_allclose(env._qpos[:, 2], 0.293, atol=0.003)


def test_energy_does_not_grow_without_input() -> None:
    """A robot without motors, thrown upwards and spinning: kinetic plus potential energy never increases."""
    model = build_model()
    model.actuator_gainprm[:] = 0.0
    model.actuator_biasprm[:] = 0.0
    model.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_ENERGY
    data = mujoco.MjData(model)
    data.qpos[2], data.qpos[7:] = 0.6, DEFAULT_POSE
    data.qvel[:] = np.random.default_rng(0).uniform(-1, 1, 18)
    mujoco.mj_forward(model, data)
    energy = [data.energy.sum()]
    for _ in range(600):
        mujoco.mj_step(model, data)
        energy.append(data.energy.sum())
    # Contacts are springs: their energy is not in the sum and comes back within a few steps.
    assert max(energy) <= energy[0] + 1e-6
    assert np.diff(energy).max() < 0.5
    assert energy[-1] < energy[0] - 10


def test_torques_follow_the_servo_and_its_limit() -> None:
    env = make(2, groups=["policy"], randomize={"motor_strength": [0.5, 0.5], "kp": [0.8, 0.8], "kd": [1.5, 1.5]})
    root = env.reset()
    put(env, qvel=0.0)
    env._qpos[:, 2] = 2.0  # in the air
    env._qpos[:, 7:] = DEFAULT_POSE
    env._qvel[:, 6:] = 0.5
    env._rows.joint_offset[:] = 0.01
    action = torch.zeros(2, 12)
    action[0, 0], action[1, 2] = 1.0, 4.0
    env.step(root.set("action", action))
    model, data = env._batch.get_model(0), env._batch.get_data(0)
    data.qpos[7:], data.qvel[6:] = DEFAULT_POSE, 0.5
    mujoco.mj_forward(model, data)
    # kp = 40 * 0.8 * 0.5 = 16, kd = 1 * 1.5 * 0.5 = 0.75; targets 0.25 a + 0.01 from the joint:
    # joint 0: 16 * 0.26 - 0.75 * 0.5 = 3.785; the others 16 * 0.01 - 0.375 = -0.215
    np.testing.assert_allclose(data.actuator_force, [3.785] + [-0.215] * 11, atol=1e-9)
    model, data = env._batch.get_model(1), env._batch.get_data(1)
    data.qpos[7:], data.qvel[6:] = DEFAULT_POSE, 0.5
    data.ctrl[2] = 10.0
    mujoco.mj_forward(model, data)
    assert data.actuator_force[2] == 18.0  # 36 N m * 0.5
    # The action was clamped to 4: a target 1 rad away.
    assert env._ctrl[1, 2] == pytest.approx(DEFAULT_POSE[2] + 1.0 + 0.01)


def test_the_kinematics_of_the_feet_equal_mujocos() -> None:
    model = build_model()
    data = mujoco.MjData(model)
    joints = DEFAULT_POSE + np.random.default_rng(0).uniform(-0.5, 0.5, (5, 12))
    for row, expected in zip(joints, _foot_positions(joints), strict=True):
        data.qpos[:7], data.qpos[7:] = [0, 0, 0, 1, 0, 0, 0], row
        mujoco.mj_kinematics(model, data)
        feet = [data.site(f"{leg}_foot").xpos for leg in ("FL", "FR", "RL", "RR")]
        np.testing.assert_allclose(feet, expected, atol=1e-12)


def test_observations_equal_mujocos_sensors_of_the_state() -> None:
    """Velocities, gravity and contact forces, computed by MuJoCo from the same state."""
    env = make(3, groups=GROUPS)
    steps, _ = play(env, env.reset(), torch.rand(20, 3, 12) - 0.5)
    got = steps[-1]["next"]
    for row in range(3):
        model, data = env.simulation(row)
        velocity = np.zeros(6)
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, model.body("trunk").id, velocity, 1)
        rotation = data.body("trunk").xmat.reshape(3, 3)
        np.testing.assert_allclose(got["critic"][row, 45:48], 2 * velocity[3:], atol=1e-5)
        np.testing.assert_allclose(got["policy"][row, 3:6], 0.25 * velocity[:3], atol=1e-5)
        np.testing.assert_allclose(got["policy"][row, 6:9], rotation.T @ [0, 0, -1], atol=1e-6)
        np.testing.assert_allclose(got["policy"][row, 9:21], data.qpos[7:] - DEFAULT_POSE, atol=1e-6)
        np.testing.assert_allclose(got["priv_explicit"][row, 3], data.body("trunk").xpos[2], atol=1e-6)
    assert got["priv_explicit"][:, 4:8].sum(-1).min() * 100 > 50  # N, of a robot of about 130 N in motion


def test_a_mirrored_state_with_the_mirrored_action_becomes_the_mirror() -> None:
    env = make(2, groups=[group for group in GROUPS if group != "metrics"], randomize={"push": [0, 0]})
    root = env.reset()
    joints = env.mirrors["action"]
    # Row 1 becomes the mirror of row 0, hidden parameters included.
    vector, angular = np.array([1, -1, 1]), np.array([-1, 1, -1])
    env._qpos[1] = env._qpos[0]
    env._qpos[1, 1] *= -1
    env._qpos[1, 3:7] = env._qpos[0, 3:7] * [1, -1, 1, -1]
    env._qvel[1, :3], env._qvel[1, 3:6] = env._qvel[0, :3] * vector, env._qvel[0, 3:6] * angular
    for block in (env._qpos[:, 7:], env._qvel[:, 6:]):
        block[1] = joints(torch.from_numpy(block[0].copy())).numpy()
    rows = env._rows
    swap = joints.index.numpy()
    rows.friction[1], rows.trunk_mass[1], rows.trunk_centre[1] = (
        rows.friction[0],
        rows.trunk_mass[0],
        rows.trunk_centre[0] * vector,
    )
    for name in ("motor_strength", "kp", "kd"):
        getattr(rows, name)[1] = getattr(rows, name)[0][swap]
    rows.joint_offset[1] = joints(torch.from_numpy(rows.joint_offset[0].copy())).numpy()
    rows.last_joint_velocity[1] = env._qvel[1, 6:]
    rows.command[1] = rows.command[0] * [1, -1, -1]
    env._write_parameters(np.array([1]))
    k = env._kinematics()
    env._remember(k, np.array([1]))
    root = env._pack(k)
    data, generator = root, torch.Generator().manual_seed(3)
    for step in range(31):
        for key, mirror in env.mirrors.items():
            if key != "action":
                torch.testing.assert_close(
                    data[key][1], mirror(data[key][0]), atol=1e-5 if key != "depth" else 1e-3, rtol=1e-5
                )
        if step:
            for group in ("task", "style", "penalty"):
                torch.testing.assert_close(data["reward_groups", group][0], data["reward_groups", group][1])
        action = torch.randn(12, generator=generator)
        action = torch.stack([action, joints(action)])
        data = env.step(data.exclude("reward").set("action", action))["next"]
        if step >= 1:
            # The physics agrees far below float32: chaos would show here first.
            np.testing.assert_allclose(joints(torch.from_numpy(env._qpos[0, 7:])).numpy(), env._qpos[1, 7:], atol=1e-9)
    assert not data["terminated"].any()


@pytest.mark.parametrize("kind", BOTH)
def test_mirrors_are_involutions_and_cover_every_group(kind: type[Quadruped]) -> None:
    env = make(2, kind, groups=GROUPS)
    data = env.rollout(2)
    keys = {key for key in env.observation_spec.keys() if key not in ("metrics", "reward_groups")}
    assert set(env.mirrors) == keys | {"action"}
    for key in keys:
        mirrored = env.mirrors[key](data[key])
        assert torch.equal(env.mirrors[key](mirrored), data[key])


# ---- hidden parameters ---------------------------------------------------------------------------------------------


def test_a_row_moves_as_a_model_compiled_with_its_hidden_parameters() -> None:
    env = make(3)
    root = env.reset()
    twins = []
    for row in range(3):
        # Everything is written into a fresh model by hand, and derived constants computed by MuJoCo.
        model, rows = build_model(), env._rows
        model.geom_friction[:, 0] = rows.friction[row]
        trunk = model.body("trunk").id
        model.body_inertia[trunk] *= (7.0 + rows.trunk_mass[row]) / 7.0
        model.body_mass[trunk] = 7.0 + rows.trunk_mass[row]
        model.body_ipos[trunk] = rows.trunk_centre[row]
        model.actuator_gainprm[:, 0] = 40.0 * rows.kp[row]
        model.actuator_biasprm[:, 1] = -40.0 * rows.kp[row]
        model.actuator_biasprm[:, 2] = -1.0 * rows.kd[row]
        limit = np.tile([24.0, 24.0, 36.0], 4) * rows.motor_strength[row]
        model.actuator_forcerange[:] = np.stack([-limit, limit], -1)
        data = mujoco.MjData(model)
        mujoco.mj_setConst(model, data)
        mujoco.mj_resetData(model, data)
        data.qpos[:], data.qvel[:] = env._qpos[row], env._qvel[row]
        twins.append((model, data))
    for _ in range(20):
        action = torch.rand(3, 12) * 2 - 1
        root = env.step(root.set("action", action))["next"].exclude("reward")
        for row, (model, data) in enumerate(twins):
            data.ctrl[:] = DEFAULT_POSE + 0.25 * action[row].double().numpy() + env._rows.joint_offset[row]
            mujoco.mj_step(model, data, 4)
            np.testing.assert_allclose(env._qpos[row], data.qpos, atol=1e-8)
    trunk_x = [float(data.qpos[0]) for _, data in twins]
    assert len({round(x, 6) for x in trunk_x}) == 3


def test_priv_latent_reports_what_the_physics_uses() -> None:
    env = make(64, groups=["priv_latent"])
    latent = env.reset()["priv_latent"].double().numpy()
    for row in (0, 17, 63):
        model, _ = env.simulation(row)
        trunk = model.body("trunk").id
        expected = [model.body_mass[trunk] - 7.0, *model.body_ipos[trunk], model.geom("FL_foot").friction[0]]
        expected += [*(model.actuator_gainprm[:, 0] / 40.0), *(-model.actuator_biasprm[:, 2])]
        np.testing.assert_allclose(latent[row], expected, atol=1e-6)
        np.testing.assert_allclose(model.actuator_gainprm[:, 0], -model.actuator_biasprm[:, 1])
    for column, name in ((0, "trunk_mass"), (1, "trunk_centre"), (4, "friction")):
        low, high = RANDOMIZATION[name]
        assert latent[:, column].min() >= low and latent[:, column].max() <= high
        assert np.ptp(latent[:, column]) > 0.7 * (high - low)
    # Strength and stiffness multiply: 0.9 * 0.9 to 1.1 * 1.1.
    assert 0.81 <= latent[:, 5:].min() < 0.85 and 1.15 < latent[:, 5:].max() <= 1.21


def test_slides_as_far_as_the_friction_allows() -> None:
    """On its trunk with the legs folded, at 2 m/s: Coulomb friction stops it after v^2 / (2 mu g)."""
    folded = np.tile([0.0, 1.88, -0.6], 4)
    distances = {}
    for friction in (0.5, 1.0):
        env = make(1, randomize=_only(friction=friction), groups=["policy"])
        root = env.reset()
        put(env, qvel=0.0)
        env._qpos[0] = [0, 0, 0.054, 1, 0, 0, 0, *folded]
        env._qvel[0, 0] = 2.0
        action = torch.from_numpy((folded - DEFAULT_POSE) / 0.25).float()
        play_on = [env.step(root.set("action", action[None])) for _ in range(80)]
        assert len(play_on) == 80 and np.abs(env._qvel[0, :3]).max() < 0.05
        distances[friction] = env._qpos[0, 0]
    # 4 / (2 * 0.5 * 9.81) = 0.408 m, and half of it at friction 1.
    assert distances[0.5] == pytest.approx(0.408, rel=0.1)
    assert distances[1.0] == pytest.approx(0.204, rel=0.1)


def test_sags_as_much_as_the_motors_are_weak() -> None:
    height = {}
    for strength in (0.8, 1.0, 1.3):
        env = make(1, randomize=_only(motor_strength=strength), groups=["policy"])
        play(env, env.reset(), torch.zeros(100, 1, 12))
        height[strength] = env._qpos[0, 2]
    assert height[0.8] < height[1.0] - 0.004 < height[1.3] - 0.008
    assert height[1.0] == pytest.approx(0.293, abs=0.003)


def test_pushes_change_the_velocity_by_their_magnitude() -> None:
    env = make(4096, randomize=_only(push=0.7), groups=["policy"])
    env._push()
    change = np.hypot(*(env._qvel[:, :2] - _start_velocity(4096)).T)
    pushed = change > 1e-9
    np.testing.assert_allclose(change[pushed], 0.7, atol=1e-9)
    assert pushed.mean() == pytest.approx(0.02 / 4.0, abs=0.004)  # one in 200 steps


def _start_velocity(num_envs: int) -> np.ndarray:
    return make(num_envs, randomize=_only(push=0.7), groups=["policy"])._qvel[:, :2].copy()


def _only(**values: float) -> dict[str, list[float]]:
    nominal = dict(friction=0.8, trunk_mass=0, trunk_centre=0, motor_strength=1, kp=1, kd=1, joint_offset=0, push=0)
    return {name: [value, value] for name, value in (nominal | values).items()}


# ---- rewards, ends, commands ---------------------------------------------------------------------------------------


def test_reward_by_hand() -> None:
    """A robot in the air, in the default pose, moving at (0.5, 0, 0) m/s while (0.7, 0, 0.2) is commanded."""
    env = make(1, randomize=False, groups=["reward_groups", "policy"])
    root = env.reset()
    put(env, qvel=0.0)
    env._qpos[0] = [0, 0, 5.0, 1, 0, 0, 0, *DEFAULT_POSE]
    env._rows.command[0] = [0.7, 0.0, 0.2]
    env._rows.last_joint_velocity[:] = 0.0
    env._rows.contact[:] = False
    out = env.step(root.set("action", torch.zeros(1, 12)))["next"]
    # In free fall after 0.02 s: vz = -0.196, no contact, pose error zero (the servos are at rest), height 5 - 0.3.
    q, v = env._qpos[0], env._qvel[0]
    assert v[2] == pytest.approx(-0.1962, abs=1e-3)
    velocity_error = (v[0] - 0.7) ** 2 + v[1] ** 2
    task = 1.5 * np.exp(-velocity_error / 0.1) + 0.75 * np.exp(-((v[5] - 0.2) ** 2) / 0.1) + 0.1
    assert out["reward_groups", "task"].item() == pytest.approx(0.02 * task, abs=1e-4)
    style = -20 * (q[2] - 0.30) ** 2
    assert out["reward_groups", "style"].item() == pytest.approx(0.02 * style, abs=2e-3)
    assert out["reward_groups", "penalty"].item() == pytest.approx(0.02 * -2.0 * v[2] ** 2, abs=2e-4)
    assert out["reward"].item() == 0.0  # the sum is negative


def test_reward_of_moving_while_told_to_stand_by_hand() -> None:
    """In the air, in the default pose, at (0.3, 0.4) m/s with a command of zero; and standing still on the ground."""
    env = make(2, randomize=False, groups=["reward_groups"])
    root = env.reset()
    put(env, qvel=0.0)
    env._qpos[:] = [0, 0, 0.45, 1, 0, 0, 0, *DEFAULT_POSE]
    env._rows.command[:] = 0.0
    env._qpos[1, 2] = 0.33
    env._qvel[0, :2] = [0.3, 0.4]
    style = env.step(root.set("action", torch.zeros(2, 12)))["next", "reward_groups", "style"]
    # After 0.02 s of fall it is 0.448 m high. Speed 0.5: -5 * 0.5 - 20 * 0.148^2 = -2.938
    assert style[0].item() == pytest.approx(0.02 * -2.938, abs=2e-4)
    play(env, env.reset(), torch.zeros(240, 2, 12))  # it has stopped rocking
    env._rows.command[:] = 0.0
    still = env.step(env._pack(env._kinematics()).set("action", torch.zeros(2, 12)))["next", "reward_groups", "style"]
    # All feet on the ground: +1, less what the sag of joints and trunk costs.
    offset = np.abs(env._qpos[:, 7:] - DEFAULT_POSE)
    expected = 1.0 - 0.5 * offset.sum(-1) - 0.05 * np.square(offset).sum(-1) - 20 * (env._qpos[:, 2] - 0.30) ** 2
    np.testing.assert_allclose(still[:, 0].numpy(), 0.02 * expected, atol=2e-4)


def test_reward_is_the_sum_of_its_groups_or_zero_and_weights_can_be_replaced() -> None:
    env = make(3, groups=["reward_groups"])
    steps, _ = play(env, env.reset(), torch.rand(30, 3, 12) - 0.5)
    for step in steps:
        total = sum(step["next", "reward_groups"].values())
        torch.testing.assert_close(step["next", "reward"], total.clamp(min=0.0))
    silent = {name: 0.0 for name in ("track_velocity", "track_yaw", "alive", "trot", "air_time", "stand")}
    env = make(3, groups=["reward_groups"], rewards=silent)
    steps, _ = play(env, env.reset(), torch.rand(5, 3, 12) - 0.5)
    assert all((step["next", "reward_groups", "task"] == 0).all() for step in steps)
    assert all((step["next", "reward"] == 0).all() for step in steps)


def test_terms_move_between_groups() -> None:
    actions = torch.rand(20, 3, 12) - 0.5
    totals = []
    for moved in ({}, {"torque": "style", "alive": "penalty"}):
        env = make(3, groups=["reward_groups"], term_groups=moved, rewards={"alive": 0.5})
        steps, _ = play(env, env.reset(), actions)
        totals.append(torch.stack([torch.cat(list(s["next", "reward_groups"].values()), -1) for s in steps]))
    (before, after), alive = totals, 0.5 * 0.02
    torch.testing.assert_close(after[..., 0], before[..., 0] - alive)
    torque = after[..., 1] - before[..., 1]
    assert (torque < 0).all()
    torch.testing.assert_close(after[..., 2], before[..., 2] + alive - torque)


def test_a_fall_terminates() -> None:
    env = make(3, groups=["policy", "metrics"])
    root = env.reset()
    put(env, qvel=0.0)
    env._qpos[:, 2] = 0.4
    angle = np.deg2rad(65)
    env._qpos[0, 3:7] = [np.cos(angle / 2), np.sin(angle / 2), 0, 0]  # on its side
    env._qpos[1, 2] = 0.1  # too low; row 2 is well
    out = env.step(root.set("action", torch.zeros(3, 12)))["next"]
    assert out["terminated"].squeeze(-1).tolist() == [True, True, False]
    assert out["truncated"].squeeze(-1).tolist() == [False, False, False]
    assert out["metrics", "fallen"].squeeze(-1).tolist() == [1.0, 1.0, 0.0]


def test_commands_stay_in_their_ranges_change_every_five_seconds_and_one_in_five_is_zero() -> None:
    env = make(4000, num_threads=2, groups=["policy"])
    command = env.reset()["policy"][:, :3] / torch.tensor([2.0, 2.0, 0.5])
    zero = (command == 0).all(-1)
    assert zero.float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert command[~zero].norm(dim=-1).min() >= 0.1
    assert command.min(0).values.tolist() == pytest.approx([0.0, -0.3, -0.5], abs=0.01)
    assert command.max(0).values.tolist() == pytest.approx([1.0, 0.3, 0.5], abs=0.01)
    env = make(3, commands={"vx": [0.4, 0.5]}, zero_commands=0.0)
    steps, _ = play(env, env.reset(), torch.zeros(252, 3, 12))
    seen = torch.stack([step["policy"][:, 0] for step in steps]) / 2
    assert torch.equal(seen[0].expand(250, -1), seen[:250]) and not (seen[250] == seen[0]).any()
    assert ((seen >= 0.4) & (seen <= 0.5)).all()


def test_histories_hold_the_last_frames_oldest_first() -> None:
    groups = ["policy", "prop", "history", "prop_history", "amp"]
    env = make(2, groups=groups, history_length=3, prop_history_length=2)
    assert env.history_layout == "oldest_first"
    steps, root = play(env, env.reset(), torch.rand(6, 2, 12) - 0.5)
    policy = [step["policy"] for step in steps] + [root["policy"]]
    first = steps[0]
    assert torch.equal(first["history"], policy[0].repeat(1, 3))
    assert torch.equal(steps[1]["history"], torch.cat([policy[0], policy[0], policy[1]], -1))
    assert torch.equal(root["history"], torch.cat(policy[-3:], -1))
    assert torch.equal(root["prop_history"], torch.cat([steps[-1]["prop"], root["prop"]], -1))
    angles = [frame[:, 9:21] + torch.from_numpy(DEFAULT_POSE).float() for frame in policy]
    torch.testing.assert_close(root["amp_window"], torch.cat(angles[-5:], -1), atol=1e-6, rtol=0)
    env._rows.command[:] = [[0, 0, 0], [0.5, 0, 0]]
    assert env._pack(env._kinematics())["amp_gate"].squeeze(-1).tolist() == [0.0, 1.0]
    mask = torch.tensor([[True], [False]])
    root = env.reset(root.set("_reset", mask))
    assert torch.equal(root["history"][0], root["policy"][0].repeat(3))
    assert torch.equal(root["history"][1], torch.cat([frame[1] for frame in policy[-3:]]))


# ---- divergence ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["nan", "velocity", "position", "force"])
def test_a_diverging_row_is_terminated_counted_and_never_returned(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where MuJoCo would write its log
    env = make(3, groups=GROUPS)
    _, root = play(env, env.reset(), torch.zeros(3, 3, 12))
    twin = make(3, groups=GROUPS)
    _, other = play(twin, twin.reset(), torch.zeros(3, 3, 12))
    if cause == "nan":
        env._qvel[1, 7] = np.nan
    elif cause == "velocity":
        env._qvel[1, 7] = 1e12
    elif cause == "position":
        env._qpos[1, 2] = np.inf
    else:
        env._batch.bind("qfrc_applied")[1] = 1e9
    out = env.step(root.set("action", torch.zeros(3, 12)))["next"]
    same = twin.step(other.set("action", torch.zeros(3, 12)))["next"]
    assert out["terminated"].squeeze(-1).tolist() == [False, True, False]
    assert out["metrics", "diverged"].squeeze(-1).tolist() == [0.0, 1.0, 0.0]
    assert out["metrics", "fallen"][1] == 0.0 and out["reward"][1] == 0.0
    for key, leaf in out.items(True, True):
        assert leaf.isfinite().all() and leaf.float().abs().max() < 1e3, key
        assert torch.equal(leaf[[0, 2]], same[key][[0, 2]]), key
    root = env.reset(out.exclude("reward").set("_reset", out["done"]))
    out = env.step(root.set("action", torch.zeros(3, 12)))["next"]
    assert not out["done"].any()
    assert os.listdir(tmp_path) == []
    assert "WARNING" not in "".join(capfd.readouterr())


def random_steps(kind: type[Quadruped], steps: int, num_envs: int, **arguments: Any) -> tuple[int, int]:
    """Uniform random actions over the whole box; returns how many rows diverged and how many episodes ended."""
    env = make(num_envs, kind, groups=["policy", "critic", "metrics"], num_threads=2, **arguments)
    root, generator, diverged, ended = env.reset(), torch.Generator().manual_seed(0), 0, 0
    for _ in range(steps // num_envs):
        action = torch.rand(num_envs, 12, generator=generator) * 8 - 4
        step, root = env.step_and_maybe_reset(root.set("action", action))
        diverged += int(step["next", "metrics", "diverged"].sum())
        ended += int(step["next", "done"].sum())
        assert step["next", "critic"].isfinite().all() and step["next", "critic"].abs().max() < 50
    return diverged, ended


@pytest.mark.parametrize("difficulty", [None, 0.0, 1.0])
def test_no_state_diverges_in_random_steps(difficulty: float | None) -> None:
    kind, arguments = (Quadruped, {}) if difficulty is None else (QuadrupedTerrain, {"difficulty": difficulty})
    diverged, ended = random_steps(kind, 4000, 40, **arguments)
    assert diverged == 0 and ended > 0


@pytest.mark.slow
@pytest.mark.parametrize("difficulty", [None, 0.0, 1.0])
def test_no_state_diverges_in_200_000_random_steps(difficulty: float | None) -> None:
    kind, arguments = (Quadruped, {}) if difficulty is None else (QuadrupedTerrain, {"difficulty": difficulty})
    diverged, ended = random_steps(kind, 200_000, 100, **arguments)
    print(f"difficulty {difficulty}: {diverged} of 200000 control steps diverged; {ended} episodes ended")
    assert diverged == 0


# ---- the trot ------------------------------------------------------------------------------------------------------


def test_trot_angles_of_the_feasibility_study() -> None:
    clip = trot_clip(1.0, speed=0.6, frequency=2.0, fps=1000)
    hip, knee = clip[:, 1], clip[:, 2]
    # Ranges measured there at 0.6 m/s and 2 Hz, and its Fourier fit (foot error 4 mm, so about 0.02 rad).
    assert (hip.min(), hip.max()) == pytest.approx((0.67, 1.25), abs=0.01)
    assert (knee.min(), knee.max()) == pytest.approx((-2.10, -1.65), abs=0.01)
    phase = 2 * np.pi * 2.0 * np.arange(1000) / 1000
    fit = 0.993 + 0.251 * np.cos(phase + 2.82) + 0.077 * np.cos(2 * phase - 2.63) + 0.021 * np.cos(3 * phase - 1.63)
    np.testing.assert_allclose(hip, fit, atol=0.03)
    np.testing.assert_array_equal(clip[:, :3], clip[:, 9:])  # diagonal legs move together
    np.testing.assert_allclose(clip[:500, 3:6], clip[250:750, 0:3], atol=1e-9)  # the others half a stride later


def test_trotting_feet_do_not_slip() -> None:
    fps, speed = 500, 0.6
    feet = _foot_positions(trot_clip(1.0, speed=speed, fps=fps))
    low = feet[..., 2] < -(0.29 - 0.022) + 1e-9
    assert low.mean() == pytest.approx(0.5, abs=0.02)
    carried = low[1:] & low[:-1]
    velocity = np.diff(feet[..., 0], axis=0) * fps
    np.testing.assert_allclose(velocity[carried], -speed, atol=1e-9)
    assert feet[..., 2].max() - feet[..., 2].min() == pytest.approx(0.06, abs=1e-3)


def test_trot_files_load_without_pickle(tmp_path: Path) -> None:
    save_trot_clips(tmp_path / "trot.npz", speeds=(0.5, 1.0), seconds=2.0)
    data = np.load(tmp_path / "trot.npz", allow_pickle=False)
    assert int(data["num_motions"]) == 3 and float(data["fps"]) == 50.0
    assert tuple(data["joint_names"]) == JOINT_NAMES
    assert all(data[f"motion_{index}"].shape == (100, 12) for index in range(3))
    np.testing.assert_allclose(data["motion_0"], np.tile(DEFAULT_POSE, (100, 1)), rtol=1e-6)
    with pytest.raises(ValueError, match="npz"):
        save_trot_clips(tmp_path / "trot.txt")
    with pytest.raises(ValueError, match="cannot reach"):
        trot_clip(speed=3.0)


def test_a_missing_mujoco_is_named_only_when_a_robot_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mujoco", None)  # any import of it raises ImportError
    with pytest.raises(ImportError, match=r'pip install "edenrl\[mujoco\]"'):
        Quadruped(1)
