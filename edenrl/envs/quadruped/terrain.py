"""Ground: height fields, the courses built on them, and looking at them (height scans and depth images)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["TERRAIN_KINDS", "Course", "DepthCamera", "HeightField", "build_course"]

TERRAIN_KINDS = ("rough", "stairs", "gaps", "steps")

RESOLUTION = 0.05  # m; a riser spans one cell, since a height field cannot be vertical
TILE_X, TILE_Y = 8.0, 3.2  # m
START, FINISH = 0.6, 7.4  # m along a tile: where a robot is put, and where the course ends
LANE = 1.4  # m; a robot further from its lane's middle has left the course
GAP_DEPTH = 0.5  # m
_FLAT_START, _FLAT_END = 1.4, 7.2  # obstacles lie between

# At difficulty 1; all of them grow from zero in proportion to the difficulty.
_ROUGHNESS, _RISER, _GAP, _STEP = 0.08, 0.14, 0.45, 0.2  # m


@dataclass(frozen=True)
class HeightField:
    """Heights on a regular grid, as MuJoCo collides with them.

    MuJoCo splits every cell into two triangles along the diagonal from its low x, low y corner to its high x, high y
    corner; ``height`` evaluates exactly these.

    Args:
        heights: ``[rows, columns]`` in m; rows run along y, columns along x.
        resolution: size of a cell in m.

    The grid starts at ``(0, 0)``; points outside take the height of the nearest border.

    Examples:
        >>> import numpy as np
        >>> from edenrl.envs.quadruped import HeightField
        >>> field = HeightField(np.array([[0.0, 1.0], [0.0, 1.0]]), resolution=0.5)
        >>> float(field.height(np.array(0.25), np.array(0.1)))
        0.5
    """

    heights: np.ndarray
    resolution: float = RESOLUTION

    @property
    def low(self) -> float:
        """Lowest height, in m."""
        return float(self.heights.min())

    @property
    def span(self) -> float:
        """Highest minus lowest height, in m."""
        return float(self.heights.max()) - self.low

    @property
    def half_extent(self) -> tuple[float, float]:
        """Half of the size along x and y, in m."""
        rows, columns = self.heights.shape
        return 0.5 * (columns - 1) * self.resolution, 0.5 * (rows - 1) * self.resolution

    @property
    def centre(self) -> tuple[float, float]:
        """Middle of the field, in m."""
        return self.half_extent

    def normalized(self) -> np.ndarray:
        """Heights mapped to [0, 1], as MuJoCo stores them."""
        return (self.heights - self.low) / max(self.span, 1e-3)

    def height(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Height of the surface at points of any shape, in m."""
        rows, columns = self.heights.shape
        u = np.clip(x / self.resolution, 0.0, columns - 1.000001)
        v = np.clip(y / self.resolution, 0.0, rows - 1.000001)
        i, j = v.astype(np.int64), u.astype(np.int64)
        f, g = u - j, v - i
        corner = i * columns + j
        flat = self.heights.ravel()
        a, b, c, e = flat[corner], flat[corner + 1], flat[corner + columns], flat[corner + columns + 1]
        return np.where(f > g, a + f * (b - a) + g * (e - b), a + g * (c - a) + f * (e - c))


@dataclass(frozen=True)
class Course:
    """Tiles of every kind (along y) at every level of difficulty (along x), with way-points through each.

    Examples:
        >>> from edenrl.envs.quadruped import build_course
        >>> course = build_course(("rough", "gaps"), (0.0, 0.5, 1.0), seed=0)
        >>> course.waypoints.shape  # kinds, levels, way-points, xy
        (2, 3, 5, 2)
    """

    field: HeightField
    waypoints: np.ndarray
    """World positions ``[kinds, levels, 5, 2]`` in m; the last one lies at the end of the course."""
    difficulties: np.ndarray
    """``[levels]``, in [0, 1]."""

    def origin(self, kind: np.ndarray, level: np.ndarray) -> np.ndarray:
        """World position ``[n, 2]`` where a tile's x starts and its lane's middle lies."""
        return np.stack([level * TILE_X, (kind + 0.5) * TILE_Y], axis=-1)


def build_course(kinds: tuple[str, ...], difficulties: tuple[float, ...], seed: int) -> Course:
    """Lay out one tile of 8 m by 3.2 m for each kind and difficulty.

    Difficulty 0 is flat ground. At 1, noise has an amplitude of 8 cm on a grid of 0.2 m (``rough``), risers are 14 cm
    on treads of 30 cm, up and down again (``stairs``), gaps are 45 cm wide and 50 cm deep (``gaps``), and hurdles are
    up to 20 cm high (``steps``). In between, sizes are proportional to the difficulty.

    Args:
        kinds: any of ``TERRAIN_KINDS``.
        difficulties: one per level, each in [0, 1].
        seed: of the random parts.

    Raises:
        ValueError: an unknown kind, no kind, or a difficulty outside [0, 1].

    Examples:
        >>> from edenrl.envs.quadruped import build_course
        >>> field = build_course(("stairs",), (0.0, 1.0), seed=0).field
        >>> field.heights.shape, round(field.span, 2)
        ((65, 321), 1.12)
    """
    unknown = [kind for kind in kinds if kind not in TERRAIN_KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds={list(kinds)} was given; expected at least one of {list(TERRAIN_KINDS)}.")
    if not difficulties or not all(0.0 <= value <= 1.0 for value in difficulties):
        raise ValueError(f"difficulties={list(difficulties)} was given; expected numbers in [0, 1].")
    rng = np.random.default_rng(seed)
    columns, rows = round(TILE_X / RESOLUTION), round(TILE_Y / RESOLUTION)
    heights = np.zeros((len(kinds) * rows + 1, len(difficulties) * columns + 1))
    waypoints = np.zeros((len(kinds), len(difficulties), 5, 2))
    for k, kind in enumerate(kinds):
        for level, difficulty in enumerate(difficulties):
            tile = _TILES[kind](difficulty, rng, rows, columns)
            heights[k * rows : (k + 1) * rows, level * columns : (level + 1) * columns] = tile
            waypoints[k, level, :, 0] = level * TILE_X + np.linspace(2.0, FINISH, 5)
            waypoints[k, level, :, 1] = (k + 0.5) * TILE_Y + rng.uniform(-0.4, 0.4, 5)
    return Course(HeightField(heights), waypoints, np.asarray(difficulties, dtype=np.float64))


def _rough(difficulty: float, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    cells = round(0.2 / RESOLUTION)
    coarse = rng.uniform(-1.0, 1.0, (rows // cells + 2, columns // cells + 2))
    x, y = np.meshgrid(np.arange(columns) / cells, np.arange(rows) / cells)
    i, j = y.astype(int), x.astype(int)
    f, g = x - j, y - i
    near = coarse[i, j] * (1 - f) + coarse[i, j + 1] * f
    far = coarse[i + 1, j] * (1 - f) + coarse[i + 1, j + 1] * f
    along = np.arange(columns) * RESOLUTION
    fade = np.clip(np.minimum(along - _FLAT_START, _FLAT_END - along) / 0.2, 0.0, 1.0)
    return _ROUGHNESS * difficulty * fade * (near * (1 - g) + far * g)


def _stairs(difficulty: float, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    along = np.arange(columns) * RESOLUTION
    treads = 8
    # Half a cell further, so that rounding never moves an edge.
    up = np.floor((along - _FLAT_START + 0.5 * RESOLUTION) / 0.3) + 1
    down = np.floor((_FLAT_END - along + 0.5 * RESOLUTION) / 0.3) + 1
    profile = np.clip(np.minimum(up, down), 0, treads) * _RISER * difficulty
    return np.tile(profile, (rows, 1))


def _gaps(difficulty: float, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    width = round(_GAP * difficulty / RESOLUTION)
    profile = np.zeros(columns)
    for start in np.arange(_FLAT_START + 0.1, _FLAT_END - _GAP, 1.3):
        first = round((start + rng.uniform(0.0, 0.3)) / RESOLUTION)
        profile[first : first + width] = -GAP_DEPTH
    return np.tile(profile, (rows, 1))


def _steps(difficulty: float, rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    profile = np.zeros(columns)
    for start in np.arange(_FLAT_START, _FLAT_END - 0.8, 1.2):
        first = round(start / RESOLUTION)
        length = round(rng.uniform(0.3, 0.8) / RESOLUTION)
        profile[first : first + length] = _STEP * difficulty * rng.uniform(0.5, 1.0)
    return np.tile(profile, (rows, 1))


_TILES = {"rough": _rough, "stairs": _stairs, "gaps": _gaps, "steps": _steps}


class DepthCamera:
    """A forward-looking depth camera that sees the ground by marching along its rays.

    The camera sits 0.2 m in front of the trunk's centre and 0.03 m above, looks down by 0.5 rad, and spans 87 degrees
    horizontally over 87 columns; pixels are square. Depth is measured along the optical axis, cut at 2.5 m. The robot's
    own body is not seen.

    Args:
        field: the ground; None: the horizontal plane through the origin, which is intersected exactly.

    Examples:
        >>> import torch
        >>> from edenrl.envs.quadruped import DepthCamera
        >>> camera = DepthCamera()
        >>> camera(torch.tensor([[0.0, 0.0, 0.3]]), torch.eye(3)[None]).shape
        torch.Size([1, 58, 87])
    """

    HEIGHT, WIDTH, FAR = 58, 87, 2.5
    POSITION, PITCH, HORIZONTAL_VIEW = (0.2, 0.0, 0.03), 0.5, math.radians(87.0)
    # The surface is sampled this densely along a ray before the crossing is narrowed down by bisection.
    _STRIDE, _BISECTIONS = 0.1, 7

    def __init__(self, field: HeightField | None = None) -> None:
        self._heights = None
        if field is not None:
            self._heights = torch.from_numpy(field.heights).float().contiguous()
            self._resolution = field.resolution
        right = torch.arange(self.WIDTH) - 0.5 * (self.WIDTH - 1)
        down = torch.arange(self.HEIGHT) - 0.5 * (self.HEIGHT - 1)
        focal = 0.5 * self.WIDTH / math.tan(0.5 * self.HORIZONTAL_VIEW)
        down, right = torch.meshgrid(down / focal, right / focal, indexing="ij")
        # In the trunk's frame, with the component along the optical axis equal to 1.
        cos, sin = math.cos(self.PITCH), math.sin(self.PITCH)
        rays = torch.stack([cos - sin * down, -right, -sin - cos * down], -1).reshape(-1, 3)
        self._rays, self._offset = rays, torch.tensor(self.POSITION)

    def __call__(self, position: Tensor, rotation: Tensor) -> Tensor:
        """Depth images.

        Args:
            position: trunk positions ``[N, 3]`` in the world, float32, in m.
            rotation: trunk to world rotations ``[N, 3, 3]``, float32.

        Returns:
            ``[N, 58, 87]`` in m, at most 2.5.
        """
        origin = position + (rotation @ self._offset.unsqueeze(-1)).squeeze(-1)
        rays = self._rays @ rotation.transpose(-1, -2)
        depth = self._plane(origin, rays) if self._heights is None else self._march(origin, rays)
        return depth.reshape(-1, self.HEIGHT, self.WIDTH)

    def _plane(self, origin: Tensor, rays: Tensor) -> Tensor:
        falling = rays[..., 2].clamp(max=-1e-6)
        return (origin[:, None, 2] / -falling).clamp(0.0, self.FAR)

    def _march(self, origin: Tensor, rays: Tensor) -> Tensor:
        assert self._heights is not None
        rows, columns = self._heights.shape
        flat, cell = self._heights.view(-1), torch.tensor([self._resolution, self._resolution, 1.0])
        u0, v0, z0 = (origin / cell)[:, None].unbind(-1)
        du, dv, dz = (rays / cell).unbind(-1)

        def inside(depth: Tensor | float) -> Tensor:
            """Whether the point at a depth lies under the surface."""
            u = torch.addcmul(u0, du, torch.as_tensor(depth)).clamp_(0.0, columns - 1.001)
            v = torch.addcmul(v0, dv, torch.as_tensor(depth)).clamp_(0.0, rows - 1.001)
            j, i = u.long(), v.long()
            f, g = u.sub_(j), v.sub_(i)
            corner = i.mul_(columns).add_(j)
            a, b = flat[corner], flat[corner + 1]
            c, e = flat[corner + columns], flat[corner + columns + 1]
            height = torch.where(f > g, a + f * (b - a) + g * (e - b), a + g * (c - a) + f * (e - c))
            return torch.addcmul(z0, dz, torch.as_tensor(depth)) < height

        # The first sample below the surface, then bisection between it and the sample before it.
        below = torch.full(rays.shape[:-1], 2.0 * self.FAR)
        for step in range(round(self.FAR / self._STRIDE), 0, -1):  # backwards: the nearest is written last
            depth = step * self._STRIDE
            below = torch.where(inside(depth), depth, below)
        hit = below <= self.FAR
        above = below - self._STRIDE
        for _ in range(self._BISECTIONS):
            middle = 0.5 * (above + below)
            under = inside(middle)
            below, above = torch.where(under, middle, below), torch.where(under, above, middle)
        return torch.where(hit, 0.5 * (above + below), self.FAR)
