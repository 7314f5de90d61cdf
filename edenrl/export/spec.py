"""The written contract of an exported policy: what ``policy_spec.json`` holds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["EnvContract", "PolicySpec"]


class _Part(BaseModel):
    # JSON has neither NaN nor infinity, and a misspelt field must not pass as an absent one.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class ModelFile(_Part):
    """One graph on disk."""

    format: Literal["onnx", "jit", "pt2"]
    """ONNX, TorchScript, or a torch.export program."""
    file: str
    """File name, beside the spec."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Of the file's bytes; a reader refuses a file that does not match."""
    size: int = Field(ge=1)
    """Bytes."""
    opset: int | None = None
    """ONNX opset of the graph; null for the other formats."""


class TensorInfo(_Part):
    """One input or output tensor."""

    name: str
    """Name in the graph."""
    dtype: Literal["float32", "int64"]
    """Element type."""
    shape: list[int | Literal["batch"]]
    """Sizes; "batch" marks the free axis, the same in all tensors."""


class Verification(_Part):
    """What was compared before the export was moved in."""

    control_steps: int
    """Steps of the real environment, with the policy's own actions."""
    rows: int
    """Environments stepped together."""
    probes: int
    """Further random observations, at batch sizes 1 and 7."""
    tolerance: float
    """Absolute and relative."""
    max_deviation: dict[str, float]
    """Largest absolute difference of actions and state, by format."""


class ModelSpec(_Part):
    """The graphs and their tensors."""

    files: list[ModelFile] = Field(min_length=1)
    """One entry per format; every graph computes the same."""
    inputs: list[TensorInfo]
    """obs, then the recurrent state (h_in, c_in for RNN modules), which starts at zero. TorchScript takes obs alone and
    keeps the state inside; call its reset() when an episode begins."""
    outputs: list[TensorInfo]
    """actions, then the next state in the order of the inputs."""
    normalization: Literal["in the graph", "none"]
    """Observations go in un-normalized in either case."""
    verification: Verification | None = None
    """null when verification was switched off."""


class Term(_Part):
    """A named part of an observation group."""

    name: str
    """Quantity."""
    width: int = Field(ge=1)
    """Number of features."""
    unit: str | None = None
    """Physical unit, before scaling."""
    scale: list[float] | None = None
    """Factor of each feature: the policy reads the quantity times this; null when the environment does not say."""
    at_reset: float | None = None
    """Value of every feature when an episode begins; null: measured, as at every other step."""
    meaning: str | None = None
    """What exactly is measured: frame, sign, order."""

    @model_validator(mode="after")
    def _check_length(self) -> Term:
        if self.scale is not None and len(self.scale) != self.width:
            raise ValueError(f"{self.name!r} has {len(self.scale)} factors in scale for {self.width} features")
        return self


class History(_Part):
    """How frames are stacked in an observation group."""

    frames: int = Field(ge=1)
    """Number of frames, one for each control step."""
    order: Literal["oldest_first", "newest_first"]
    """Where the current frame stands: last, or first."""
    at_reset: Literal["repeat", "zeros"] | None = None
    """What stands in for the frames before an episode: its first frame, or zeros; null when nobody says."""
    frame_of: str | None = None
    """The group that is one such frame; null when none is."""


class ObservationSpec(_Part):
    """One observation group as a slice of obs."""

    key: str
    """Key of the group in the environment's TensorDict."""
    start: int
    """First feature in obs."""
    stop: int
    """One past the last feature in obs."""
    width: int
    """stop - start."""
    shape: list[int]
    """Shape before flattening (row-major)."""
    terms: list[Term] = []
    """What fills the group (of a history: one frame), in order; empty when the environment does not say."""
    history: History | None = None
    """The frames that the group stacks; null: it holds one, or the environment does not say."""
    unread: tuple[int, int] | None = None
    """Start and stop of features (of a history: in each frame) that the policy does not read: a deployment may put any
    number there. null: it reads all."""
    interval: int | None = Field(default=None, ge=1)
    """Control steps between two updates; the group stays as it is in between. null: one, or not known."""
    mean: list[float] | None = None
    """Mean of each feature in training, from the policy's running statistics; null when it keeps none."""
    std: list[float] | None = None
    """Standard deviation of each feature in training."""
    transforms: list[str] = []
    """Transforms between the simulator and this group, first applied first; a deployment repeats them."""


class ActionSpec(_Part):
    """What the actions mean and what the environment does with them: ``bias + scale * clip(actions, low, high)``."""

    key: str
    """Key of the action in the environment's TensorDict."""
    kind: Literal["continuous", "discrete"]
    """Vector of floats, or one of several choices: its index, or one-hot, as the shape of actions says."""
    dim: int = Field(ge=1)
    """Number of action components; for a discrete action the number of choices."""
    low: list[float | None] | None = None
    """Lower bounds as the policy sees them; null entries are unbounded, null: no box."""
    high: list[float | None] | None = None
    """Upper bounds."""
    clip: bool | None = None
    """Whether actions are clipped to the bounds before use; null when nobody says."""
    scale: list[float] | None = None
    """Factor per component after clipping; null for discrete actions, and when the environment does not say."""
    bias: list[float] | None = None
    """Offset per component after scaling; null when scale is."""
    names: list[str] | None = None
    """Component names, such as joints, in order."""
    unit: str | None = None
    """Unit after scaling."""
    meaning: str | None = None
    """What the environment does with the result."""
    transforms: list[str] = []
    """Further transforms between actions and simulator that this spec cannot express; a deployment repeats them."""


class Rate(_Part):
    """How often the policy runs; null where the environment does not say."""

    control_dt: float | None = Field(default=None, gt=0)
    """Seconds between two actions."""
    decimation: int | None = Field(default=None, ge=1)
    """Simulation steps per action."""
    sim_dt: float | None = Field(default=None, gt=0)
    """Seconds per simulation step."""


class Entity(_Part):
    """One articulated body."""

    name: str
    """Name."""
    joint_names: list[str]
    """Joints, in the order that observations and actions use."""
    default_positions: list[float] | None = None
    """Rest pose (rad or m), in joint order."""
    stiffness: list[float] | None = None
    """Proportional gains, in joint order."""
    damping: list[float] | None = None
    """Derivative gains, in joint order."""
    effort_limits: list[float] | None = None
    """Largest torque or force of each joint's motor, in joint order."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Entity:
        for name in ("default_positions", "stiffness", "damping", "effort_limits"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.joint_names):
                raise ValueError(
                    f"{self.name}.{name} has {len(values)} values for {len(self.joint_names)} joints; give one each"
                )
        return self


class Provenance(_Part):
    """Where the policy comes from."""

    versions: dict[str, str]
    """Versions of edenrl, torch, torchrl and, for ONNX, of its packages."""
    task: str | None = None
    """Name of the environment."""
    task_kwargs: dict[str, Any] = {}
    """Arguments of the environment's constructor, as the policy was trained."""
    checkpoint: str | None = None
    """Name of the checkpoint the weights come from."""
    checkpoint_sha256: str | None = None
    """Over the checkpoint's files, names included, in order of their names."""
    git_revision: str | None = None
    """Commit of the working directory, with "-dirty" when it had changes; null outside a git checkout."""
    created: str
    """UTC time, ISO 8601."""


class PolicySpec(_Part):
    """Everything a deployment needs to know about an exported policy; the schema of ``policy_spec.json``.

    The JSON schema is published with the documentation (``docs/pages/assets/policy_spec.schema.json``).

    Examples:
        >>> PolicySpec.model_json_schema()["required"][:3]
        ['model', 'observations', 'actions']
    """

    schema_version: Literal[1] = 1
    """Version of this layout; a reader refuses others."""
    model: ModelSpec
    """Graphs and tensors."""
    observations: list[ObservationSpec] = Field(min_length=1)
    """The groups of obs, in order."""
    actions: ActionSpec
    """The actions."""
    rate: Rate
    """Control and simulation rate."""
    entities: list[Entity] = []
    """Articulated bodies; empty when the environment does not say."""
    provenance: Provenance
    """Origin."""


class ActionContract(_Part):
    """What an environment declares about its actions."""

    scale: list[float] | None = None
    """Factor that the simulator applies to each component; null: not known, which is not 1."""
    bias: list[float] | None = None
    """Offset that the simulator adds to each component; null: not known, which is not 0."""
    clip: bool | None = None
    """Whether the simulator itself clips to its box; null: not known."""
    names: list[str] | None = None
    """Component names."""
    unit: str | None = None
    """Unit after scaling."""
    meaning: str | None = None
    """What the simulator does with them."""

    @model_validator(mode="after")
    def _check_both(self) -> ActionContract:
        if (self.scale is None) != (self.bias is None):
            raise ValueError("actions.scale and actions.bias belong together: declare both (zeros add nothing) or none")
        return self


class EnvContract(_Part):
    """What an environment may declare for deployment: the return value of its method ``policy_contract()``.

    An environment without that method is exported with what its specs say. What is not declared is null or empty in the
    policy spec. A transform may have the method as well, for the observation groups that it makes.

    Examples:
        >>> EnvContract(rate={"control_dt": 0.02, "decimation": 4, "sim_dt": 0.005}).rate.control_dt
        0.02
    """

    observations: dict[str, list[Term]] = {}
    """Terms by observation group; of a group with a history the terms of one frame."""
    histories: dict[str, History] = {}
    """How frames are stacked, by observation group."""
    intervals: dict[str, int] = {}
    """Control steps between two updates, for groups that are not updated at every step."""
    actions: ActionContract = Field(default_factory=ActionContract)
    """Scaling and meaning of the actions."""
    rate: Rate = Field(default_factory=Rate)
    """Control and simulation rate."""
    entities: list[Entity] = []
    """Articulated bodies."""
    randomized: list[str] = []
    """Names of the values above that currently differ from environment to environment. Such an environment is refused;
    its method ``set_nominal()``, which ``nominal_env`` calls, switches these randomizations off."""
