"""Export a run's policy: python examples/export_policy.py RUN [--formats onnx jit pt2] [--checkpoint latest].

Writes RUN/policy: the graphs, which run without torch, and policy_spec.json, which says what goes in and comes out.
"""

import argparse
import json

from evaluate import load_run

from edenrl.export import check_formats, load_policy
from edenrl.training import build_env, export_run, format_table, run_script, setup


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("run", help="run directory, such as runs/ppo-PointMass-s1-...")
    parser.add_argument("--formats", nargs="+", default=["onnx", "jit"], help="onnx, jit, pt2 (default: onnx jit)")
    parser.add_argument("--checkpoint", default="best", help="best (default), latest, or a checkpoint's path")
    parser.add_argument("--output", help="folder to export into (default: RUN/policy)")
    parser.add_argument("--no_verify", action="store_true", help="do not compare the files with the policy")
    args = parser.parse_args(argv)
    verify = not args.no_verify
    check_formats(args.formats, verify=verify)  # before anything is built

    trainer, cfg = load_run(args.run)
    cfg.device = "cpu"
    env = build_env(cfg, setup(cfg), num_envs=1)
    policy = trainer.make_policy(cfg, env)
    env.close()
    options = dict(checkpoint=args.checkpoint, formats=args.formats, verify=verify)
    files = export_run(cfg, policy, args.run, args.output, **options)
    rows = {name: f"{path} ({path.stat().st_size:,} bytes)" for name, path in files.items()}
    if verify:
        report = json.loads(files["spec"].read_text())["model"]["verification"]
        worst = ", ".join(f"{name} {value:.2g}" for name, value in report["max_deviation"].items())
        rows["verified"] = f"largest deviation {worst} (tolerance {report['tolerance']:g})"
    else:
        rows["verified"] = "no: --no_verify compares nothing, and policy_spec.json says so"
    if "onnx" in files and verify:
        latency = load_policy(files["spec"].parent).latency()
        rows["latency, batch 1"] = f"p50 {latency['p50']:.0f} us, p99 {latency['p99']:.0f} us"
    print(format_table(rows, f"{cfg.algorithm.name} on {cfg.env.name}"))


if __name__ == "__main__":
    run_script(main)
