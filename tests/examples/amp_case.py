"""What the AMP tests share: an environment with motion windows, and what each process of a distributed run does.

``python amp_case.py FOLDER [FLAG...]`` trains under torchrun; each process leaves ``FOLDER/<rank>.pt``. Not a
test file itself.
"""

import importlib.util
import sys
from pathlib import Path

import torch

from edenrl import distributed, training
from edenrl.envs import PointMass, register_env
from edenrl.training import run_script


class Windowed(PointMass):
    """PointMass whose first four observations count as two frames of width two.

    The gate is open, closed, open in the first process only, or opens late: after 40 steps.
    """

    control_dt = 1 / 60
    built = 0

    def __init__(self, num_envs, gate="open", **kwargs):
        super().__init__(num_envs, **kwargs)
        type(self).built += 1
        gates = {"open": 1.0, "closed": 0.0, "late": 0.0, "first": 1.0 if distributed.rank() == 0 else 0.0}
        self.gate, self.late, self.taken = gates[gate], gate == "late", 0
        whole = self.observation_spec["observation"]
        self.observation_spec["amp_window"], self.observation_spec["amp_gate"] = whole[..., :4], whole[..., :1]

    def _with_window(self, out):
        whole = out["observation"]
        return out.set("amp_window", whole[..., :4].clone()).set("amp_gate", torch.full_like(whole[..., :1], self.gate))

    def _step(self, tensordict):
        self.taken += 1
        if self.late and self.taken > 40:
            self.gate = 1.0
        return self._with_window(super()._step(tensordict))

    def _reset(self, tensordict):
        return self._with_window(super()._reset(tensordict))


def load_script(name):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(folder, flags):
    script, runs = load_script("train_amp"), []

    class Recording(training.Run):
        def __enter__(self):
            runs.append(self)
            return super().__enter__()

    script.Run = Recording
    script.main(flags)
    parts = runs[0].folder.checkpoints.components
    state = {f"{name}.{k}": v for name in ("policy", "discriminator") for k, v in parts[name].state_dict().items()}
    out = {"state": state, "steps": parts["discriminator_step"].updates, "windows": len(parts["windows"].component)}
    torch.save(out, folder / f"{distributed.rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    register_env("Windowed", lambda n, **kw: Windowed(n, **kw), override=True)
    run_script(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
