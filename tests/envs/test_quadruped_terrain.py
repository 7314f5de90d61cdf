from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edenrl.envs import QuadrupedTerrain
from edenrl.envs.quadruped import TERRAIN_KINDS, DepthCamera, HeightField, Quadruped, build_course, build_model

mujoco = pytest.importorskip("mujoco", minversion="3.17")


def make(num_envs: int, **kwargs: Any) -> QuadrupedTerrain:
    return QuadrupedTerrain(num_envs, **{"seed": 0, "num_threads": 1, **kwargs})


def cast(model: Any, origin: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """MuJoCo's own ray caster against the ground alone; infinity where nothing is hit."""
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    group, geom = np.array([1, 0, 0, 0, 0, 0], np.uint8), np.zeros(1, np.int32)
    model.geom_group[model.geom_bodyid != 0] = 3
    out = []
    for ray in rays:
        length = np.linalg.norm(ray)
        distance = mujoco.mj_ray(model, data, origin, ray / length, group, 1, -1, geom)
        out.append(np.inf if distance < 0 else distance / length)
    return np.array(out)


# ---- height fields -------------------------------------------------------------------------------------------------


def test_height_by_hand() -> None:
    field = HeightField(np.array([[0.0, 1.0], [2.0, 5.0]]), resolution=0.5)
    x = np.array([0.0, 0.5, 0.0, 0.5, 0.25, 0.25, 0.4, 0.1, 9.0])
    y = np.array([0.0, 0.0, 0.5, 0.5, 0.0, 0.25, 0.1, 0.4, -9.0])
    # Corners; half-way along the lower edge; on the diagonal (0 + 5) / 2; below it f = 0.8, g = 0.2: 0 + 0.8 * 1 +
    # 0.2 * (5 - 1) = 1.6; above it f = 0.2, g = 0.8: 0 + 0.8 * 2 + 0.2 * (5 - 2) = 2.2; outside: the nearest corner.
    np.testing.assert_allclose(field.height(x, y), [0, 1, 2, 5, 0.5, 2.5, 1.6, 2.2, 1.0], atol=1e-5)


@pytest.mark.parametrize("kind", TERRAIN_KINDS)
def test_heights_are_those_that_mujoco_collides_with(kind: str) -> None:
    field = build_course((kind,), (1.0,), seed=1).field
    rng = np.random.default_rng(0)
    points = rng.uniform([0.01, 0.01], [7.9, 3.1], (200, 2))
    model = build_model(field)
    down = np.array([[0.0, 0.0, -1.0]])
    seen = [5.0 - cast(model, np.array([x, y, 5.0]), down)[0] for x, y in points]
    np.testing.assert_allclose(field.height(*points.T), seen, atol=2e-5)


@pytest.mark.parametrize("kind", TERRAIN_KINDS)
def test_difficulty_grows_from_flat_ground_to_the_documented_sizes(kind: str) -> None:
    def tile(difficulty: float) -> np.ndarray:
        return build_course((kind,), (difficulty,), seed=3).field.heights

    assert (tile(0.0) == 0).all()
    spans = [np.ptp(tile(d)) for d in (0.25, 0.5, 1.0)]
    if kind == "gaps":
        share = [(tile(d) < 0).mean() for d in (0.25, 0.5, 1.0)]
        assert spans == [0.5] * 3 and 0 < share[0] < share[1] < share[2]
        row = tile(1.0)[30] < 0
        edges = np.flatnonzero(np.diff(row.astype(int)))
        np.testing.assert_allclose(np.diff(edges)[::2] * 0.05, 0.45, atol=1e-9)
    else:
        largest = {"rough": (0.11, 0.16), "stairs": (8 * 0.14, 8 * 0.14), "steps": (0.1, 0.2)}[kind]
        assert largest[0] - 1e-9 <= spans[2] <= largest[1] + 1e-9
        np.testing.assert_allclose(spans, np.array([0.25, 0.5, 1.0]) * spans[2], rtol=1e-9)
    if kind == "stairs":
        riser = np.abs(np.diff(tile(1.0)[0]))
        np.testing.assert_allclose(riser[riser > 0], 0.14)
    # Robots start and finish on level ground.
    assert (tile(1.0)[:, :28] == 0).all() and (tile(1.0)[:, 145:] == 0).all()


def test_refuses_unknown_arguments_kinds_and_difficulties_outside() -> None:
    with pytest.raises(ValueError, match=r"kinds=\['lava'\]"):
        make(1, kinds=["lava"])
    with pytest.raises(ValueError, match="difficulties"):
        make(1, difficulty=1.5)
    with pytest.raises(ValueError, match=r"does not take \['dificulty'\]"):
        make(1, dificulty=0.5)


# ---- looking at the ground -----------------------------------------------------------------------------------------


def test_scan_sees_the_ground_around_the_heading() -> None:
    env = make(1, kinds=["stairs"], difficulty=1.0, groups=["scan"])
    env.reset()
    yaw = 0.4
    env._qpos[0, :3] = [2.0, 1.5, 0.7]
    env._qpos[0, 3:7] = [np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]
    scan = env._pack(env._kinematics())["scan"][0].reshape(12, 11).double().numpy()
    model = build_model(env._field)
    for i in (0, 3, 11):
        for j in (0, 5, 10):
            x, y = -0.45 + 0.15 * i, -0.75 + 0.15 * j
            point = np.array([2.0 + np.cos(yaw) * x - np.sin(yaw) * y, 1.5 + np.sin(yaw) * x + np.cos(yaw) * y])
            ground = 5.0 - cast(model, np.array([*point, 5.0]), np.array([[0.0, 0.0, -1.0]]))[0]
            assert scan[i, j] == pytest.approx(np.clip(0.7 - 0.3 - ground, -1, 1), abs=2e-5)
    assert np.ptp(scan) > 0.5
    flat = Quadruped(1, groups=["scan"], seed=0, num_threads=1)
    height = flat.reset()["scan"]
    torch.testing.assert_close(height, torch.full((1, 132), float(flat._qpos[0, 2] - 0.3)))


def scene(name: str) -> HeightField:
    heights = np.zeros((65, 161))
    if name == "step":
        heights[:, 60:] = 0.15
    elif name == "wall":
        heights[:, 60:] = 1.0
    return HeightField(heights)


POSITION = np.array([2.0, 1.6, 0.3])


@pytest.mark.parametrize("name", ["flat", "step", "wall"])
def test_depth_equals_exact_ray_casts(name: str) -> None:
    camera, field = DepthCamera(scene(name)), scene(name)
    yaw = 0.2
    rotation = np.array([[np.cos(yaw), -np.sin(yaw), 0], [np.sin(yaw), np.cos(yaw), 0], [0, 0, 1]])
    image = camera(torch.from_numpy(POSITION[None]).float(), torch.from_numpy(rotation[None]).float())[0]
    origin = POSITION + rotation @ np.array(camera.POSITION)
    rays = pixel_rays() @ rotation.T
    chosen = np.arange(0, len(rays), 11)
    depth = image.flatten().double().numpy()[chosen]
    # Rays that leave the field sideways see its border continued, where MuJoCo has nothing.
    ends = origin[:2] + rays[chosen, :2] * depth[:, None]
    inside = ((ends > 0.02) & (ends < np.array([7.98, 3.18]))).all(-1)
    expected = np.minimum(cast(build_model(field), origin, rays[chosen]), 2.5)
    assert inside.mean() > 0.7
    np.testing.assert_allclose(depth[inside], expected[inside], atol=2e-3)


def pixel_rays() -> np.ndarray:
    """Directions through the pixels of a pinhole camera that looks down by 0.5 rad, 87 degrees wide, row by row."""
    focal = 43.5 / np.tan(np.deg2rad(43.5))
    rays = []
    for row in range(58):
        for column in range(87):
            right, down = (column - 43) / focal, (row - 28.5) / focal
            rays.append([np.cos(0.5) - np.sin(0.5) * down, -right, -np.sin(0.5) - np.cos(0.5) * down])
    return np.array(rays)


def test_depth_of_flat_ground_by_hand() -> None:
    # Middle of the image: the optical axis from 0.33 m above the ground, 0.5 rad down, travels 0.33 / sin 0.5 = 0.6883.
    for camera in (DepthCamera(), DepthCamera(scene("flat"))):
        position, level = torch.from_numpy(POSITION[None]).float(), torch.eye(3)[None]
        image = camera(position, level)
        assert image.shape == (1, 58, 87)
        middle = image[0, 28:30, 43].mean().item()
        assert middle == pytest.approx(0.6883, abs=3e-3)
        # Depth along the axis does not change along a row, and the picture is symmetric.
        assert (image[0, 40] - image[0, 40, 43]).abs().max() < 1e-3
        assert image[0, 0].min() > image[0, 57].max()
    # The wall at x = 3 m is 0.8 m in front of the camera: straight ahead, 0.5 rad above the axis, 0.8 cos 0.5 = 0.702.
    camera = DepthCamera(scene("wall"))
    row = int(round(28.5 - np.tan(0.5) * 43.5 / np.tan(np.deg2rad(43.5))))
    image = camera(torch.from_numpy(POSITION[None]).float(), torch.eye(3)[None])
    assert image[0, row, 43].item() == pytest.approx((0.8 - 0.025) * np.cos(0.5), abs=0.03)


def test_depth_is_refreshed_every_fifth_step_and_at_resets() -> None:
    env = make(2, kinds=["stairs"], difficulty=1.0, groups=["depth", "policy"], prop_history_length=1)
    assert env.depth_interval == 5
    data, images = env.reset(), []
    for _ in range(11):
        images.append(data["depth"])
        data = env.step(data.exclude("reward").set("action", torch.rand(2, 12)))["next"]
    changed = [not torch.equal(a, b) for a, b in zip(images[1:], images[:-1], strict=True)]
    assert changed == [step % 5 == 4 for step in range(10)]
    before = data["depth"]
    after = env.reset(data.exclude("reward").set("_reset", torch.tensor([[True], [False]])))["depth"]
    assert not torch.equal(after[0], before[0]) and torch.equal(after[1], before[1])
    assert after.min() >= -0.5 and after.max() <= 0.5


# ---- the course ----------------------------------------------------------------------------------------------------


def at(env: QuadrupedTerrain, row: int, x: float, y: float, yaw: float = 0.0, z: float = 0.4) -> None:
    """Put a row, at rest, somewhere in its tile: x from the tile's start, y from the lane's middle."""
    corner = env._course.origin(env._rows.kind, env._rows.level)[row]
    env._qpos[row, :3] = [corner[0] + x, corner[1] + y, z]
    env._qpos[row, 3:7] = [np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]
    env._qvel[row] = 0.0


def test_arriving_is_a_success_and_leaving_the_lane_is_not() -> None:
    env = make(4, groups=["policy", "metrics"], kinds=["rough"], difficulty=0.0)
    root = env.reset()
    at(env, 0, 7.45, 0.0)
    at(env, 1, 4.0, 1.45)
    at(env, 2, -0.05, 0.0)
    at(env, 3, 4.0, 1.3)
    out = env.step(root.set("action", torch.zeros(4, 12)))["next"]
    assert out["terminated"].squeeze(-1).tolist() == [False, True, True, False]
    assert out["truncated"].squeeze(-1).tolist() == [True, False, False, False]
    assert out["metrics", "success"].squeeze(-1).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_the_curriculum_follows_success() -> None:
    env = make(4, groups=["metrics"], kinds=["rough"])
    root = env.reset()
    assert (root["metrics", "difficulty"] == 0).all()
    env._rows.level[:] = [3, 3, 3, 10]
    env._rows.waypoint[:] = 0
    at(env, 0, 7.45, 0.0, z=0.5)  # arrives
    at(env, 1, 2.0, 1.5, z=0.5)  # leaves the lane before half-way
    at(env, 2, 5.0, 1.5, z=0.5)  # after half-way
    at(env, 3, 7.45, 0.0, z=0.5)  # arrives at the hardest level
    out = env.step(root.set("action", torch.zeros(4, 12)))["next"]
    assert out["done"].all()
    root = env.reset(out.exclude("reward").set("_reset", out["done"]))
    assert env._rows.level.tolist() == [4, 2, 3, 10]
    torch.testing.assert_close(root["metrics", "difficulty"].squeeze(-1), torch.tensor([0.4, 0.2, 0.3, 1.0]))
    # A reset that follows no episode's end leaves the level alone.
    env.reset()
    assert env._rows.level.tolist() == [4, 2, 3, 10]
    # The robots stand where their tiles begin.
    x = env._qpos[:, 0] - 8.0 * env._rows.level
    np.testing.assert_allclose(x, 0.6, atol=1e-9)


def test_difficulty_is_fixed_when_given_and_kinds_take_turns() -> None:
    env = make(5, difficulty=0.7, groups=["metrics", "priv_explicit"])
    assert env._rows.kind.tolist() == [0, 1, 2, 3, 0]
    root = env.reset()
    torch.testing.assert_close(root["metrics", "difficulty"], torch.full((5, 1), 0.7))
    torch.testing.assert_close(root["priv_explicit"][:, 8], torch.full((5,), 0.7))


def test_waypoints_steer_the_robot() -> None:
    env = make(2, groups=["prop", "policy", "depth"], kinds=["rough"], difficulty=0.0)
    env.reset()
    goals = env._course.waypoints[0, 0] - env._course.origin(np.array([0]), np.array([0]))[0]
    at(env, 0, 0.6, 0.0, yaw=0.1)
    at(env, 1, goals[0, 0] + 0.1, 0.2, yaw=-1.5)
    env._after_motion(env._kinematics())
    out = env._pack(env._kinematics())
    angle = np.arctan2(goals[0, 1], goals[0, 0] - 0.6) - 0.1
    after = np.arctan2(goals[1, 1], goals[1, 0] - 0.6) - 0.1
    np.testing.assert_allclose(out["prop"][0, 6:8], [angle, after], atol=1e-5)
    # The command turns towards it: 1.5 per second times the angle, at most 0.8 rad/s; scaled by 0.5.
    assert out["policy"][0, 2].item() == pytest.approx(0.5 * 1.5 * angle, abs=1e-5)
    assert out["policy"][1, 2].item() == pytest.approx(0.5 * 0.8, abs=1e-6)
    # Row 1 has passed the first way-point and looks more than 0.6 rad away from the second.
    assert env._rows.waypoint.tolist() == [0, 1]
    assert out["delta_yaw_ok"].squeeze(-1).tolist() == [1.0, 0.0]
    assert out["prop"][:, 11:13].tolist() == [[1.0, 0.0]] * 2


def test_falling_into_a_gap_terminates() -> None:
    env = make(1, kinds=["gaps"], difficulty=1.0, groups=["policy", "metrics"])
    root = env.reset()
    gap = int(np.flatnonzero(env._course.field.heights[30] < 0)[4])
    at(env, 0, gap * 0.05, 0.0, z=0.0)
    out = env.step(root.set("action", torch.zeros(1, 12)))["next"]
    assert out["terminated"].item() and out["metrics", "fallen"].item() == 1.0


def test_robots_start_without_penetrating_the_ground() -> None:
    env = make(44, difficulty=1.0, groups=["policy"])
    for row in (0, 1, 2, 3, 20, 43):
        _, data = env.simulation(row)
        assert all(contact.dist > -1e-3 for contact in data.contact)
