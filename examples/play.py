"""Show a run's policy: python examples/play.py RUN [--output RUN/play.gif] writes one episode as GIF or mp4.

MuJoCo renders built-in quadrupeds if OpenGL is available (without a display: MUJOCO_GL=egl or osmesa). Otherwise they
are drawn as lines, from the side and from above. The toy tasks are drawn as discs. Gymnasium environments render
themselves (render_mode="rgb_array"), and so does any other environment that has a method render() for an image of its
first row. mp4 files need imageio's ffmpeg plugin.
"""

import argparse
import ctypes.util
import os
import sys
from pathlib import Path

# MuJoCo reads MUJOCO_GL at import. The import fails with "egl" if the EGL library is missing.
if sys.platform == "linux" and not os.environ.get("DISPLAY") and ctypes.util.find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")

import imageio
import torch
from evaluate import env_arguments, load_run
from torchrl.envs.utils import ExplorationType, set_exploration_type
from views import DISCS, Discs, Drawn, Rendered

from edenrl.envs import GymVectorEnv, Quadruped, wrap_env
from edenrl.training import append_primers, build_env, load_policy_weights, run_script, setup


def view_of(env, name, lines):
    """What draws an environment."""
    if isinstance(env, Quadruped):
        if lines:
            return Drawn(env)
        try:
            return Rendered(env)
        except Exception as error:  # whatever the OpenGL of this machine raises
            print(f"No OpenGL ({type(error).__name__}: {error}); drawing lines. Try MUJOCO_GL=egl.", file=sys.stderr)
            return Drawn(env)
    if type(env) in DISCS:
        return Discs(env)
    if isinstance(env, GymVectorEnv):
        return lambda: rendered_by_gymnasium(env, name)
    if callable(getattr(env, "render", None)):
        return env.render
    raise ValueError(
        f"{name} cannot be shown: {type(env).__name__} has no method render(). play.py shows the quadrupeds, the toy "
        "tasks, Gymnasium environments, and environments whose render() returns an image [height, width, 3]."
    )


def rendered_by_gymnasium(env, name):
    """An image of the first environment of a vector; a package that it needs for this may be missing."""
    try:
        return env._env.envs[0].render()
    except Exception as error:  # whatever pygame or OpenGL raises
        raise ValueError(f"{name} cannot be rendered here: {error}") from error


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory, such as runs/ppo-Quadruped-s1-...")
    parser.add_argument("--output", help="picture to write, .gif or .mp4 (default: play.gif in the run directory)")
    parser.add_argument("--checkpoint", default="best", help="best (default), latest, or a checkpoint's path")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the episode (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environment (default 0)")
    parser.add_argument("--kwargs", type=env_arguments, default={}, help="environment arguments, JSON, over the run's")
    parser.add_argument("--lines", action="store_true", help="draw lines even when OpenGL is there")
    args = parser.parse_args(argv)
    output = Path(args.output or Path(args.run) / "play.gif")
    if output.suffix not in (".gif", ".mp4"):
        raise ValueError(f"--output {output} was given; expected a name that ends in .gif or .mp4.")

    trainer, cfg = load_run(args.run)
    cfg.env.kwargs = cfg.env.kwargs | args.kwargs
    cfg.env.vectorization = "sync"  # what other processes render cannot be seen
    device = setup(cfg)
    env = build_env(cfg, device, num_envs=1, seed=args.seed)
    if isinstance(env, GymVectorEnv):
        env.close()
        cfg.env.kwargs = cfg.env.kwargs | {"render_mode": "rgb_array"}
        env = build_env(cfg, device, num_envs=1, seed=args.seed)
    draw = view_of(env, cfg.env.name, args.lines)
    policy = trainer.make_policy(cfg, env).to(device).eval()
    load_policy_weights(policy, args.run, args.checkpoint, env=env)

    contract = env.policy_contract() if hasattr(env, "policy_contract") else {}
    dt = contract.get("rate", {}).get("control_dt") or 0.02
    every = max(1, round(0.04 / dt))  # about 25 frames a second
    wrapped, frames = append_primers(wrap_env(env, **cfg.env.action_options()), policy), []
    td = wrapped.reset()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        for step in range(max(1, round(args.seconds / dt))):
            if step % every == 0:
                frames.append(draw())
            transition, td = wrapped.step_and_maybe_reset(policy(td))
            if transition["next", "done"].any():
                break
    rate = 1 / (every * dt)
    options = dict(fps=rate) if output.suffix == ".mp4" else dict(duration=1000 / rate, loop=0)
    imageio.mimsave(output, frames, **options)
    print(f"Wrote {output}: {len(frames)} frames, {(step + 1) * dt:.1f} s")


if __name__ == "__main__":
    run_script(main)
