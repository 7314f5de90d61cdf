"""Show a run's policy: python examples/play.py RUN [--output RUN/play.gif] writes one episode as GIF or mp4.

Built-in quadrupeds are rendered by MuJoCo when an OpenGL is there (MUJOCO_GL=egl or osmesa without a display), and
drawn as lines from the side and from above when not. mp4 files need imageio's ffmpeg plugin.
"""

import argparse
import ctypes.util
import json
import os
import sys
from pathlib import Path

if sys.platform == "linux" and not os.environ.get("DISPLAY") and ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is imported, which fails without the library

import imageio
import numpy as np
import torch
from evaluate import load_run
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl.envs import Quadruped, wrap_env
from edenrl.training import append_primers, build_env, load_policy_weights, run_script, setup


def lines(env):
    """Trunk and legs of the first robot in the world: five polylines of 3-D points."""
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
        views = ((2, 150, 0.0, self.env._ground(x, np.full_like(x, centre[1]))), (1, 270, centre[1], None))
        for axis, base, middle, ground in views:
            if ground is not None:
                draw.line([self._at(*point, centre, base, 0.0) for point in zip(x, ground, strict=True)], fill="sienna")
            for line, color in zip(parts, ("black", "red", "blue", "orange", "green"), strict=True):
                draw.line([self._at(p[0], p[axis], centre, base, middle) for p in line], fill=color, width=3)
        return np.asarray(image)

    def _at(self, x, height, centre, base, middle):
        return 240 + self.pixels * (x - centre[0]), base - self.pixels * (height - middle)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory, such as runs/ppo-Quadruped-s1-...")
    parser.add_argument("--output", help="picture to write, .gif or .mp4 (default: play.gif in the run directory)")
    parser.add_argument("--checkpoint", default="best", help="best (default), latest, or a checkpoint's path")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the episode (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environment (default 0)")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="environment arguments as JSON, over the run's")
    parser.add_argument("--lines", action="store_true", help="draw lines even when OpenGL is there")
    args = parser.parse_args(argv)
    output = Path(args.output or Path(args.run) / "play.gif")
    if output.suffix not in (".gif", ".mp4"):
        raise ValueError(f"--output {output} was given; expected a name that ends in .gif or .mp4.")

    trainer, cfg = load_run(args.run)
    cfg.env.kwargs = cfg.env.kwargs | args.kwargs
    device = setup(cfg)
    env = build_env(cfg, device, num_envs=1, seed=args.seed)
    if not isinstance(env, Quadruped):
        raise ValueError(f"play.py shows Quadruped and QuadrupedTerrain; this run trained on {cfg.env.name}.")
    policy = trainer.make_policy(cfg, env).to(device).eval()
    load_policy_weights(policy, args.run, args.checkpoint)
    try:
        draw = Drawn(env) if args.lines else Rendered(env)
    except Exception as error:  # whatever the OpenGL of this machine raises
        print(f"No OpenGL ({type(error).__name__}: {error}); drawing lines. Try MUJOCO_GL=egl.", file=sys.stderr)
        draw = Drawn(env)

    wrapped, frames = append_primers(wrap_env(env, action_mode=cfg.env.action_mode), policy), []
    td = wrapped.reset()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for step in range(round(args.seconds * 50)):
            if step % 2 == 0:
                frames.append(draw())
            transition, td = wrapped.step_and_maybe_reset(policy(td))
            if transition["next", "done"].any():
                break
    options = dict(fps=25) if output.suffix == ".mp4" else dict(duration=40, loop=0)
    imageio.mimsave(output, frames, **options)
    print(f"Wrote {output}: {len(frames)} frames, {(step + 1) * 0.02:.1f} s")


if __name__ == "__main__":
    run_script(main)
