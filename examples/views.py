"""Pictures of environments for play.py. A view is built for one environment; a call gives an image of its first row."""

import numpy as np

from edenrl.envs import CartPoleSwingUp, ConflictPointMass, HiddenPointMass, PointMass

SIZE, HALF = 360, 1.2  # pixels, and metres from the middle to the border


def lines(env):
    """Trunk and legs of robot 0: five polylines of 3-D points in world coordinates."""
    model, data = env.simulation(0)
    names = [body for leg in ("FL", "FR", "RL", "RR") for body in (f"{leg}_hip", f"{leg}_thigh", f"{leg}_calf")]
    points = {name: data.body(name).xpos.copy() for name in names}
    feet = {leg: data.site(f"{leg}_foot").xpos.copy() for leg in ("FL", "FR", "RL", "RR")}
    trunk = [points[f"{leg}_hip"] for leg in ("FL", "FR", "RR", "RL", "FL")]
    legs = [[points[f"{leg}_hip"], points[f"{leg}_thigh"], points[f"{leg}_calf"], feet[leg]] for leg in feet]
    return [np.array(line) for line in (trunk, *legs)]


class Rendered:
    """Frames by MuJoCo's offscreen renderer; raises when there is no OpenGL."""

    def __init__(self, env):
        import mujoco

        self.mujoco, self.env = mujoco, env
        model, _ = env.simulation(0)
        model.vis.quality.offsamples = 0
        self.renderer = mujoco.Renderer(model, 360, 480)
        self.camera = mujoco.MjvCamera()
        self.camera.distance, self.camera.elevation, self.camera.azimuth = 2.0, -15.0, 120.0

    def __call__(self):
        _, data = self.env.simulation(0)
        self.camera.lookat[:] = data.body("trunk").xpos
        self.renderer.update_scene(data, self.camera)
        self.renderer.scene.flags[self.mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self.renderer.scene.flags[self.mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return self.renderer.render()


class Drawn:
    """Frames of lines seen from the side (upper half) and from above (lower half), drawn with pillow."""

    def __init__(self, env):
        self.env, self.pixels = env, 240  # per metre

    def __call__(self):
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (480, 360), "white")
        draw, parts = ImageDraw.Draw(image), lines(self.env)
        centre = parts[0].mean(0)
        x = np.linspace(centre[0] - 1.0, centre[0] + 1.0, 121)
        heights = self.env._ground(x, np.full_like(x, centre[1]))
        draw.line([self._at(*point, centre, 150, 0.0) for point in zip(x, heights, strict=True)], fill="sienna")
        # Per view: the coordinate drawn upwards (2: z, 1: y), the pixel row of `middle`, and `middle` in metres.
        side, above = (2, 150, 0.0), (1, 270, centre[1])
        for axis, base, middle in (side, above):
            for line, color in zip(parts, ("black", "red", "blue", "orange", "green"), strict=True):
                draw.line([self._at(p[0], p[axis], centre, base, middle) for p in line], fill=color, width=3)
        return np.asarray(image)

    def _at(self, x, height, centre, base, middle):
        return 240 + self.pixels * (x - centre[0]), base - self.pixels * (height - middle)


class Discs:
    """Frames of the toy environments, painted with NumPy: a list of discs (x, y, radius in m, colour)."""

    def __init__(self, env):
        self.discs, self.env = DISCS[type(env)], env
        pixel = (np.arange(SIZE) + 0.5) * 2 * HALF / SIZE - HALF
        self.x, self.y = np.meshgrid(pixel, -pixel)

    def __call__(self):
        image = np.full((SIZE, SIZE, 3), 255, np.uint8)
        state = {name: value[0].detach().cpu().double().numpy() for name, value in self.env._state.items()}
        for x, y, radius, colour in self.discs(state):
            image[(self.x - x) ** 2 + (self.y - y) ** 2 <= radius**2] = colour
        return image


GREY, GREEN, BLUE, ORANGE = (170, 170, 170), (60, 160, 60), (40, 80, 200), (230, 140, 40)


def on_circle(angle, radius):
    return radius * np.cos(angle.item()), radius * np.sin(angle.item())


def point_mass(state):
    for centre, radius in zip(state["centres"], state["radii"], strict=True):
        yield *centre, radius, GREY
    yield *state["goal"], 0.06, GREEN
    yield *state["position"], 0.04, BLUE


def on_target(radius):
    def discs(state):
        yield *on_circle(state["angle"], radius), 0.06, GREEN
        yield *state["position"], 0.04, BLUE

    return discs


def cart_pole(state):
    """The cart stays inside the picture: it leaves on one side and comes back on the other."""
    x = (state["x"].item() + HALF) % (2 * HALF) - HALF
    angle = state["theta"].item()
    for along in np.linspace(0.0, 1.0, 50):  # the pole is 1 m long
        yield x + along * np.sin(angle), along * np.cos(angle), 0.03, ORANGE
    yield x, 0.0, 0.08, BLUE


DISCS = {
    PointMass: point_mass,
    HiddenPointMass: on_target(0.5),
    ConflictPointMass: on_target(0.6),
    CartPoleSwingUp: cart_pole,
}
