"""Play an exported policy: python examples/run_policy.py POLICY_DIR [--env PointMass] [--episodes 20].

The policy runs in onnxruntime, as on a robot: what it needs is in policy_spec.json beside the graph.
"""

import argparse

import numpy as np
import torch
from evaluate import env_arguments
from torchrl.envs import InitTracker, TransformedEnv

from edenrl.envs import action_box, make_env, wrap_env
from edenrl.export import load_policy
from edenrl.modules import DepthRefresh
from edenrl.training import evaluate, format_table, run_script


def action_limits(policy):
    """The bounds, low and high, that the spec clips actions to; infinite where it does not."""
    actions = policy.spec["actions"]
    if not actions["clip"]:
        return -np.inf, np.inf
    low = [-np.inf if bound is None else bound for bound in actions["low"]]
    return low, [np.inf if bound is None else bound for bound in actions["high"]]


def check_groups(policy, env):
    """Raises unless the environment publishes every observation group that the policy reads."""
    published = {key: tuple(leaf.shape[1:]) for key, leaf in env.observation_spec.items()}
    wanted = {o["key"]: tuple(o["shape"]) for o in policy.spec["observations"]}
    if wrong := {key: shape for key, shape in wanted.items() if published.get(key) != shape}:
        raise ValueError(
            f"The policy reads {wrong}; this environment publishes {published}. Play it on "
            f"{policy.spec['provenance']['task'] or 'the environment it was trained on'}, built as for training: "
            "--kwargs takes the env.kwargs of the run's config.json."
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("policy", help="folder of an exported policy, such as runs/.../policy")
    parser.add_argument("--env", help="environment's name (default: the one of the spec)")
    parser.add_argument("--kwargs", type=env_arguments, default={}, help="environment arguments, JSON, over the spec's")
    parser.add_argument("--episodes", type=int, default=20, help="finished episodes (default 20)")
    parser.add_argument("--seed", type=int, default=12345, help="seed of the environments (default 12345)")
    args = parser.parse_args(argv)

    policy = load_policy(args.policy)
    provenance = policy.spec["provenance"]
    name = args.env or provenance["task"]
    if name is None:
        raise ValueError("The spec names no task; say which environment to play with --env.")
    kwargs = (provenance.get("task_kwargs", {}) if name == provenance["task"] else {}) | args.kwargs

    low, high = action_limits(policy)

    def make(rows):
        env = make_env(name, rows, seed=args.seed, **kwargs)
        if "depth_new" in policy.groups and hasattr(env, "depth_interval"):  # tells a depth student of new images
            env = TransformedEnv(env, DepthRefresh(env.depth_interval))
        check_groups(policy, env)
        boxed = action_box(env) is not None
        return wrap_env(env, action_mode="clip" if boxed else "none").append_transform(InitTracker())

    def act(td):
        policy.reset(td["is_init"].flatten().numpy())  # zeroes the state of episodes that begin
        actions = policy({key: td[key].flatten(1).numpy() for key in policy.groups})
        return td.set("action", torch.from_numpy(actions.clip(low, high).astype(actions.dtype)))

    policy.reset()
    result, latency = evaluate(act, make, args.episodes), policy.latency()
    rows = {name: f"{value:.4g}" for name, value in result.items()}
    rows["latency, batch 1"] = f"p50 {latency['p50']:.0f} us, p99 {latency['p99']:.0f} us"
    print(format_table(rows, f"{args.policy} on {name}"))


if __name__ == "__main__":
    run_script(main)
