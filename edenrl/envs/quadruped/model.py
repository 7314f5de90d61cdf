"""The robot: a 12-joint quadruped built with MuJoCo's model API from boxes and capsules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from edenrl.envs.quadruped.terrain import HeightField

__all__ = ["DEFAULT_POSE", "JOINT_NAMES", "LEGS", "build_model", "model_xml"]

LEGS = ("FL", "FR", "RL", "RR")
JOINT_NAMES = tuple(f"{leg}_{joint}" for leg in LEGS for joint in ("abduction", "hip", "knee"))

# Legs bend backward, which puts the centre of mass 25 mm behind the trunk's centre; this pose puts the feet under it.
DEFAULT_POSE = np.tile([0.0, 0.88, -1.58], 4)

HIP_X, HIP_Y, THIGH_Y, LINK = 0.19, 0.05, 0.09, 0.21  # m
FOOT_RADIUS = 0.022  # m
TRUNK_MASS = 7.0  # kg
KP, KV = 40.0, 1.0  # N m / rad, N m s / rad; below a kp of 30 the stand slowly collapses
TORQUE_LIMIT = np.tile([24.0, 24.0, 36.0], 4)  # N m
PHYSICS_DT = 0.005  # s

_ABDUCTION_RANGE, _HIP_RANGE, _KNEE_RANGE = (-0.9, 0.9), (-1.2, 3.0), (-2.7, -0.6)


def build_model(height_field: HeightField | None = None) -> Any:
    """Compile the robot on flat ground or on a height field.

    A floating trunk of 7 kg and four legs of 1.5 kg (13 kg in all): ``qpos`` is the free joint 7 and the joints 12,
    ``qvel`` 6 and 12; the order of joints and actuators is ``JOINT_NAMES``. x points forward, y left, z up; positive
    hip angles move the foot back. Actuators are position servos (kp 40, kd 1) with torque limits of 24, 24 and 36 N m.
    Steps of 5 ms, friction 0.8. Feet report their normal force through touch sensors; the robot's parts collide with
    the ground only.

    Args:
        height_field: the ground; None: a horizontal plane through the origin.

    Returns:
        A ``mujoco.MjModel``.

    Raises:
        ImportError: MuJoCo is missing or older than 3.17.

    Examples:
        >>> from edenrl.envs.quadruped.model import build_model
        >>> model = build_model()
        >>> model.nq, model.nv, model.nu, round(float(model.body_mass.sum()), 3)
        (19, 18, 12, 13.0)
    """
    mujoco = load_mujoco()
    model = _model_spec(mujoco, height_field).compile()
    # The compiler notes that the trunk's inertial frame is its own and then never reads it; its centre is randomized.
    model.body_sameframe[model.body("trunk").id] = mujoco.mjtSameFrame.mjSAMEFRAME_NONE
    if height_field is not None:
        model.hfield_data[:] = height_field.normalized().ravel()
    return model


def model_xml() -> str:
    """The robot on flat ground as MJCF, for a simulator of your own: MuJoCo loads it without this library.

    Returns:
        The text of the file. Joints, actuators and sensors have the names that ``build_model`` gives them.

    Raises:
        ImportError: MuJoCo is missing or older than 3.17.

    Examples:
        >>> import mujoco
        >>> from edenrl.envs.quadruped import model_xml
        >>> mujoco.MjModel.from_xml_string(model_xml()).nu
        12
    """
    spec = _model_spec(load_mujoco(), None)
    spec.compile()
    xml: str = spec.to_xml()
    return xml


def _model_spec(mujoco: Any, height_field: HeightField | None) -> Any:
    spec = mujoco.MjSpec()
    spec.compiler.degree = False
    spec.option.timestep = PHYSICS_DT
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.iterations, spec.option.ls_iterations = 10, 8
    spec.visual.headlight.ambient = [0.4, 0.4, 0.4]
    spec.visual.global_.offwidth, spec.visual.global_.offheight = 960, 720
    _add_ground(spec, mujoco, height_field)
    _add_robot(spec, mujoco)
    return spec


def load_mujoco() -> Any:
    """Import MuJoCo, or say what to install."""
    hint = 'pip install "edenrl[mujoco]"'
    try:
        import mujoco
    except ImportError:
        raise ImportError(f"The quadruped needs the mujoco package, which is not installed: {hint}") from None
    try:
        import mujoco.batch
    except ImportError:
        raise ImportError(
            f"The quadruped needs mujoco 3.17 or newer for its batched simulation; {mujoco.__version__} is installed. "
            f"Upgrade it: {hint}"
        ) from None
    return mujoco


def _add_ground(spec: Any, mujoco: Any, field: HeightField | None) -> None:
    world = spec.worldbody
    world.add_light(pos=[0, 0, 4], dir=[0.3, 0.3, -1], type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL)
    spec.add_texture(
        name="checks",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_CHECKER,
        rgb1=[0.55, 0.6, 0.65],
        rgb2=[0.45, 0.5, 0.55],
        width=128,
        height=128,
    )
    material = spec.add_material(name="ground", texrepeat=[2, 2], texuniform=True)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "checks"
    ground = dict(name="ground", material="ground", contype=1, conaffinity=0, friction=[0.8, 0.005, 0.0001])
    if field is None:
        world.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], **ground)
        return
    rows, columns = field.heights.shape
    spec.add_hfield(
        name="terrain",
        nrow=rows,
        ncol=columns,
        size=[*field.half_extent, max(field.span, 1e-3), 0.5],
        userdata=np.zeros(rows * columns).tolist(),
    )
    # The position is set here and not after compilation: MuJoCo ignores a later change.
    world.add_geom(type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname="terrain", pos=[*field.centre, field.low], **ground)


def _add_robot(spec: Any, mujoco: Any) -> None:
    box, capsule, sphere = (getattr(mujoco.mjtGeom, f"mjGEOM_{name}") for name in ("BOX", "CAPSULE", "SPHERE"))
    part = dict(contype=0, conaffinity=1, friction=[0.8, 0.005, 0.0001])
    dark, light = [0.2, 0.22, 0.25, 1], [0.9, 0.55, 0.2, 1]
    trunk = spec.worldbody.add_body(name="trunk", pos=[0, 0, 0.32])
    trunk.add_freejoint(name="root")
    trunk.add_geom(name="trunk", type=box, size=[0.19, 0.07, 0.055], mass=TRUNK_MASS, rgba=light, **part)
    trunk.add_camera(name="side", pos=[0, -1.6, 0.5], xyaxes=[1, 0, 0, 0, 0.3, 1], mode=1)
    for leg in LEGS:
        front, left = (1 if leg[0] == "F" else -1), (1 if leg[1] == "L" else -1)
        hip = trunk.add_body(name=f"{leg}_hip", pos=[front * HIP_X, left * HIP_Y, 0])
        _add_joint(hip, f"{leg}_abduction", [1, 0, 0], _ABDUCTION_RANGE)
        hip.add_geom(
            type=capsule,
            fromto=[0, -0.025, 0, 0, 0.025, 0],
            size=[0.04, 0, 0],
            mass=0.5,
            rgba=dark,
            contype=0,
            conaffinity=0,
        )
        thigh = hip.add_body(name=f"{leg}_thigh", pos=[0, left * THIGH_Y, 0])
        _add_joint(thigh, f"{leg}_hip", [0, 1, 0], _HIP_RANGE)
        thigh.add_geom(type=capsule, fromto=[0, 0, 0, 0, 0, -LINK], size=[0.022, 0, 0], mass=0.8, rgba=light, **part)
        calf = thigh.add_body(name=f"{leg}_calf", pos=[0, 0, -LINK])
        _add_joint(calf, f"{leg}_knee", [0, 1, 0], _KNEE_RANGE)
        calf.add_geom(type=capsule, fromto=[0, 0, 0, 0, 0, -0.18], size=[0.013, 0, 0], mass=0.15, rgba=dark, **part)
        # Stiffer than MuJoCo's default, or feet sink 20 mm; the priority makes the foot's values count alone.
        calf.add_geom(
            name=f"{leg}_foot",
            type=sphere,
            pos=[0, 0, -LINK],
            size=[FOOT_RADIUS, 0, 0],
            mass=0.05,
            rgba=dark,
            solref=[0.01, 1],
            priority=1,
            **part,
        )
        calf.add_site(name=f"{leg}_foot", pos=[0, 0, -LINK], size=[FOOT_RADIUS + 0.01, 0, 0], rgba=[0, 0, 0, 0])
        spec.add_sensor(
            name=f"{leg}_touch",
            type=mujoco.mjtSensor.mjSENS_TOUCH,
            objtype=mujoco.mjtObj.mjOBJ_SITE,
            objname=f"{leg}_foot",
        )
    for name, limit in zip(JOINT_NAMES, TORQUE_LIMIT, strict=True):
        servo = spec.add_actuator(name=name, target=name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.set_to_position(kp=KP, kv=KV)
        servo.forcelimited, servo.forcerange = True, [-limit, limit]


def _add_joint(body: Any, name: str, axis: list[int], limits: tuple[float, float]) -> None:
    body.add_joint(name=name, axis=axis, limited=True, range=limits, armature=0.01, damping=0.1)
