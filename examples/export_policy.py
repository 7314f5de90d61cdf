"""Export a run's policy: python examples/export_policy.py RUN [--formats onnx jit pt2] [--checkpoint latest].

Writes RUN/policy: the graphs, which run without torch, and policy_spec.json, which says what goes in and comes out.
"""

import argparse

from evaluate import load_run

from edenrl.export import load_policy
from edenrl.training import build_env, export_run, format_table, run_script, setup


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory, such as runs/ppo-PointMass-s1-...")
    parser.add_argument("--formats", nargs="+", default=["onnx", "jit"], help="onnx, jit, pt2 (default: onnx jit)")
    parser.add_argument("--checkpoint", default="best", help="best (default), latest, or a checkpoint's path")
    parser.add_argument("--output", help="folder to export into (default: RUN/policy)")
    args = parser.parse_args(argv)

    trainer, cfg = load_run(args.run)
    cfg.device = "cpu"
    env = build_env(cfg, setup(cfg), num_envs=1)
    policy = trainer.make_policy(cfg, env)
    env.close()
    files = export_run(cfg, policy, args.run, args.output, checkpoint=args.checkpoint, formats=args.formats)
    rows = {name: f"{path} ({path.stat().st_size:,} bytes)" for name, path in files.items()}
    if "onnx" in files:
        runtime = load_policy(files["spec"].parent)
        report, latency = runtime.spec["model"]["verification"], runtime.latency()
        worst = ", ".join(f"{name} {value:.2g}" for name, value in report["max_deviation"].items())
        rows["verified"] = f"largest deviation {worst} (tolerance {report['tolerance']:g})"
        rows["latency, batch 1"] = f"p50 {latency['p50']:.0f} us, p99 {latency['p99']:.0f} us"
    print(format_table(rows, f"{cfg.algorithm.name} on {cfg.env.name}"))


if __name__ == "__main__":
    run_script(main)
