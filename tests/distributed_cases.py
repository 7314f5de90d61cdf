"""What the processes of the distributed tests run: ``python distributed_cases.py CASE FOLDER [FLAG...]``.

Each process leaves ``FOLDER/<rank>.pt``. Not a test file itself: tests/test_distributed.py starts it.
"""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from edenrl import distributed, training
from edenrl.envs import PointMass, register_env
from edenrl.modules import RunningNorm, gaussian_actor, update_normalization, value_critic
from edenrl.objectives import GAE, PPOLoss
from edenrl.optim import GradientStep, make_lr_schedule, make_optimizer

ROWS, STEPS, BATCHES = 8, 6, 3


def networks():
    torch.manual_seed(7)
    actor, critic = gaussian_actor({"observation": 3}, 2, hidden=(16,)), value_critic({"observation": 3}, hidden=(16,))
    # Statistics of their own, so that merging has something to keep; each process gives its part of the rows.
    seen = torch.randn(50, 3).chunk(distributed.world_size())[distributed.rank()]
    for network in (actor, critic):
        update_normalization(network, TensorDict(observation=seen, batch_size=[len(seen)]))
    return actor, critic


def rollout(actor):
    torch.manual_seed(3)
    done = torch.rand(ROWS, STEPS, 1) < 0.2
    truncated = done & (torch.rand(ROWS, STEPS, 1) < 0.5)
    # Rows differ in scale, so that no process's statistics are those of all.
    scale = torch.linspace(0.2, 3.0, ROWS).reshape(ROWS, 1, 1)
    data = TensorDict(
        observation=torch.randn(ROWS, STEPS, 3) * scale + scale,
        next=dict(
            observation=torch.randn(ROWS, STEPS, 3) * scale,
            reward=torch.randn(ROWS, STEPS, 1) * scale,
            done=done,
            terminated=done & ~truncated,
            truncated=truncated,
        ),
        batch_size=[ROWS, STEPS],
    )
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        return actor(data)


def iterate(part, normalize):
    """One PPO iteration on the given rows: what a trainer script does between two rollouts."""
    actor, critic = networks()
    data = rollout(actor)[part]
    GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=normalize == "rollout")(data)
    loss = PPOLoss(actor, critic, functional=False, normalize_advantage=normalize == "minibatch")
    optimizer = make_optimizer("adam", loss.parameters(), lr=3e-3)
    schedule = make_lr_schedule("adaptive", optimizer, 1, target_kl=0.03)
    step = GradientStep(loss, optimizer, max_grad_norm=0.01, lr_schedule=schedule)
    rates, norms, clipped = [], [], []
    for _ in range(5):
        # Mini-batch k holds the same steps of every row, so the parts' mini-batches make up those of the whole.
        for columns in torch.arange(STEPS).split(STEPS // BATCHES):
            losses = loss(data[:, columns].reshape(-1))
            metrics = step(losses)
            clipped.append(float(losses["clip_fraction"]))
            rates.append(float(metrics["lr"]))
            norms.append(float(metrics["grad_norm_policy"]))
    update_normalization(actor, data)
    update_normalization(critic, data)
    return {
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "rates": rates,
        "norms": norms,
        "clipped": clipped,
    }


def statistics(rank):
    def after(*batches, norm=None):
        norm = norm or RunningNorm(1)
        for batch in batches:
            norm.update(torch.tensor(batch[rank]).reshape(-1, 1))
        return norm, [float(norm.mean), float(norm.var), int(norm.count)]

    even, numbers = after(([0.0, 2.0], [10.0, 12.0]))
    out = {"even": numbers, "uneven": after(([0.0, 1.0, 2.0], [10.0]))[1], "one has none": after(([1.0, 3.0], []))[1]}
    out["twice nothing"] = after(([], []), ([], []), norm=even)[1]
    copy = RunningNorm(1)
    copy.load_state_dict(even.state_dict())
    out["loaded"] = after(([], []), norm=copy)[1]
    return out


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.used, self.other = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)


def gradient_steps(rank):
    def build(**options):
        net = TwoHeads()
        optimizer = torch.optim.SGD(net.parameters(), lr=options.pop("lr", 0.1))
        schedule = make_lr_schedule("adaptive", optimizer, 1, target_kl=0.01) if options.pop("kl", False) else None
        return net, GradientStep(net, optimizer, lr_schedule=schedule, **options)

    out, x = {}, torch.tensor([[1.0, 2.0]])
    net, step = build(on_nonfinite="skip")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    step(TensorDict(loss_a=net.used(x).sum() * (float("nan") if rank else 1.0)))
    # Finite gradients, and yet a loss that is not.
    step(TensorDict(loss_a=net.used(x).sum(), loss_b=torch.tensor(float("inf") if rank else 0.0)))
    out["skipped"] = step.skipped
    out["unchanged"] = all(torch.equal(before[k], v) for k, v in net.state_dict().items())

    net, step = build()
    try:
        step(TensorDict(loss_a=net.used(x).sum() * (float("nan") if rank else 1.0)))
    except FloatingPointError as error:
        out["raised"] = str(error)

    net, step = build()
    heads = [net.used, net.other] if rank == 0 else [net.used]
    step(TensorDict({f"loss_{i}": head(x).sum() for i, head in enumerate(heads)}))
    out["moved"] = {k: (before[k] - v).tolist() for k, v in net.state_dict().items()}

    net, step = build(kl=True, lr=1e-3)
    out["rates"] = []
    for values in ((0.005, 0.035), (0.001, 0.005), (0.005, 0.041), (float("nan"), 0.01)):
        metrics = step(TensorDict(loss_a=net.used(x).sum(), kl=torch.tensor(values[rank])))
        out["rates"].append(float(metrics["lr"]))
    out["bad kl"] = step.lr_schedule.nonfinite
    return out


def units(folder):
    alone = {kind: iterate(slice(None), kind) for kind in ("rollout", "minibatch")}
    distributed.start(torch.device("cpu"), timeout=60)
    rank = distributed.rank()
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    together = {kind: iterate(half, kind) for kind in alone}
    row = {"loss": float(rank), "episode/count": 1.0 + rank, **({"only here": 5.0} if rank else {})}
    out = {"alone": alone, "together": together, "statistics": statistics(rank), "steps": gradient_steps(rank)}
    out["row"] = distributed.average_rows(distributed.exchange(row))
    out["from_first"] = distributed.from_first(f"rank {rank}")
    torch.save(out, folder / f"{rank}.pt")
    distributed.stop()


class Fragile(PointMass):
    """Raises in the process with rank 1 after 30 steps."""

    def _step(self, tensordict):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken > 30 and distributed.rank() == 1:
            raise ValueError("the simulator of this process broke")
        return super()._step(tensordict)


def train(folder, flags):
    """train_ppo.py, with a record of what each process ends with and what it wrote."""
    register_env("Fragile", lambda n, **kw: Fragile(n, **kw), override=True)
    written, seen = [], []

    def audit(event, args):
        if event == "open" and isinstance(args[0], str) and isinstance(args[2], int) and args[2] & os.O_ACCMODE:
            written.append(args[0])
        elif event in ("os.mkdir", "os.rename"):
            written.append(str(args[0]))

    class Recording(training.Run):
        def begin(self):
            seen.append(self)
            # Another process's number must not be guessed from the outside.
            (folder / f"{distributed.rank()}.pid").write_text(str(os.getpid()))
            sys.addaudithook(audit)
            super().begin()

    spec = importlib.util.spec_from_file_location("train_ppo", Path(__file__).parents[1] / "examples" / "train_ppo.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules["train_ppo"] = script
    spec.loader.exec_module(script)
    script.Run = Recording
    run_module = sys.modules["edenrl.training.run"]

    def main():
        first = []
        build_env = run_module.build_env

        def recording_build_env(*args, **kwargs):
            env = build_env(*args, **kwargs)
            first.append(env._generator.get_state())
            return env

        run_module.build_env = recording_build_env
        script.main(flags)
        run, rank = seen[0], distributed.rank()
        parts = run.folder.checkpoints.components
        state = {f"{name}.{k}": v for name in ("policy", "critic") for k, v in parts[name].state_dict().items()}
        digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()
        torch.save(
            {
                "digest": digest,
                "state": state,
                "lr": parts["optimizer"].param_groups[0]["lr"],
                "env seed": first[0],
                "torch rng": torch.get_rng_state(),
                "iteration": run.iteration,
                "written": [path for path in written if str(run.dir) in path],
            },
            folder / f"{rank}.pt",
        )

    training.run_script(main)


if __name__ == "__main__":
    torch.set_num_threads(1)
    case, folder = sys.argv[1], Path(sys.argv[2])
    units(folder) if case == "units" else train(folder, sys.argv[3:])
