"""Evaluate a run's policy: python examples/evaluate.py RUN [--episodes 128] [--checkpoint latest].

Rebuilds the environment and the policy from RUN/config.json alone and plays whole episodes with deterministic actions.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

from edenrl.config import load_config, read_config
from edenrl.training import build_env, evaluate_run, format_table, load_policy_weights, require_run, run_script, setup

sys.path.insert(0, str(Path(__file__).parent))  # the trainer scripts stand beside this one


def load_run(run_dir):
    """The trainer module and resolved configuration of a run directory."""
    path = Path(run_dir) / "config.json"
    require_run(run_dir)
    algorithm = read_config(path).get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, dict) else None
    script = Path(__file__).with_name(f"train_{str(name).lower()}.py")
    if str(name).startswith("distill_"):  # this script is not called train_*
        script = script.with_name(f"{name}.py")
    if not script.exists():
        raise ValueError(f"{path} names the algorithm {name!r}, but there is no {script.name} here to rebuild it with.")
    trainer = importlib.import_module(script.stem)
    return trainer, load_config(trainer.Train, path)


def env_arguments(text):
    """The value of --kwargs: arguments of the environment's constructor as a JSON object."""
    try:
        kwargs = json.loads(text)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, such as '{{\"max_steps\": 50}}', got {text!r}")
    if fixed := sorted(kwargs.keys() & {"name", "num_envs", "device", "vectorization"}):
        raise argparse.ArgumentTypeError(f"{', '.join(fixed)} cannot be changed here; the run and this script decide")
    if "seed" in kwargs:
        raise argparse.ArgumentTypeError(f"seed has a flag of its own: --seed {kwargs['seed']}")
    return kwargs


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory, such as runs/ppo-PointMass-s1-...")
    parser.add_argument("--episodes", type=int, help="finished episodes (default: as in the run's configuration)")
    parser.add_argument("--checkpoint", default="best", help="best (default), latest, or a checkpoint's name or path")
    parser.add_argument("--seed", type=int, help="seed of the environments (default: the run's evaluation seed)")
    parser.add_argument("--kwargs", type=env_arguments, default={}, help="environment arguments, JSON, over the run's")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)

    run = Path(args.run).expanduser()
    trainer, cfg = load_run(run)
    cfg.env.kwargs = cfg.env.kwargs | args.kwargs
    device = setup(cfg)
    env = build_env(cfg, device, num_envs=1)
    policy = trainer.make_policy(cfg, env).to(device)
    env.close()
    path = load_policy_weights(policy, run, args.checkpoint, env=env)
    result = evaluate_run(cfg, policy, device, num_episodes=args.episodes, seed=args.seed)
    if args.json:
        print(json.dumps({"checkpoint": str(path), **result}))
    else:
        print(format_table({"checkpoint": path, **{k: f"{v:.4g}" for k, v in result.items()}}, cfg.env.name))


if __name__ == "__main__":
    run_script(main)
