"""Every export is compared with its policy, and what differs is refused before anything is written."""

import copy
import importlib.util
import json
import os
import sys

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer
from torchrl.modules import GRUModule, NormalParamExtractor, ProbabilisticActor, TanhNormal, TruncatedNormal

from edenrl.envs import PointMass, wrap_env
from edenrl.export import PolicySpec, VerificationError, export_policy, load_policy
from edenrl.export.folder import staging
from edenrl.modules import GaussianMLP, gaussian_actor


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def hooked(policy, change):
    """The policy with a network whose ``export_module()`` returns a changed copy."""

    def export_module(self):
        network = copy.deepcopy(self)
        network.__class__ = GaussianMLP
        change(network)
        return network

    policy.module[0].module.__class__ = type("Hooked", (GaussianMLP,), {"export_module": export_module})
    return policy


def without_normalizer(network):
    network.norm = None


def without_last_bias(network):
    nn.init.zeros_(network.mlp[-1].bias)


def with_two_actions_swapped(network):
    with torch.no_grad():
        for parameter in network.mlp[-1].parameters():
            parameter.copy_(parameter.flip(0))


def with_another_epsilon(network):
    network.norm.eps = 1e-8


def with_relu_for_elu(network):
    for name, part in network.mlp.named_children():
        if isinstance(part, nn.ELU):
            setattr(network.mlp, name, nn.ReLU())


@pytest.mark.parametrize("form", ["onnx", "jit", "pt2"])
def test_a_dropped_normalizer_is_caught_and_the_earlier_export_survives(tmp_path, point_mass, form, as_trained):
    policy = as_trained(gaussian_actor({"observation": 14}, 2, hidden=(16,)))
    export_policy(policy, point_mass, tmp_path, formats=["jit", form] if form != "jit" else ["jit"])
    before = files_of(tmp_path)
    with pytest.raises(
        VerificationError, match=rf"The {form} export differs from the policy at control step 0: largest"
    ):
        export_policy(hooked(policy, without_normalizer), point_mass, tmp_path, formats=[form])
    assert files_of(tmp_path) == before and "policy.pt" in before
    assert len(list((tmp_path / ".export").iterdir())) == 2, "one export and the link to it"


@pytest.mark.parametrize(
    "change", [without_last_bias, with_two_actions_swapped, with_another_epsilon, with_relu_for_elu]
)
def test_small_differences_are_caught(tmp_path, point_mass, change, as_trained):
    policy = as_trained(gaussian_actor({"observation": 14}, 2, hidden=(16,)))
    with pytest.raises(VerificationError, match="The jit export differs from the policy at .* largest deviation"):
        export_policy(hooked(policy, change), point_mass, tmp_path, formats=["jit"])
    assert not files_of(tmp_path)


def test_an_equal_replacement_passes(tmp_path, point_mass, as_trained):
    policy = as_trained(gaussian_actor({"observation": 14}, 2, hidden=(16,)))
    export_policy(hooked(policy, lambda network: None), point_mass, tmp_path, formats=["jit"])
    assert "policy.pt" in files_of(tmp_path)


def test_a_dropped_action_scale_is_caught(tmp_path, monkeypatch, as_trained, build):
    policy, make = build("squash")
    spec = make().base_env.action_spec_unbatched
    wide = gaussian_actor(
        {"observation": 14}, spec.__class__(low=spec.space.low * 3, high=spec.space.high * 3), squash=True
    )
    as_trained(wide)
    from edenrl.export.graph import _ACTION_OF

    monkeypatch.setitem(_ACTION_OF, TanhNormal, lambda self, given: torch.tanh(given["loc"]))
    with pytest.raises(VerificationError, match="differs from the policy"):
        export_policy(wide, make(), tmp_path, formats=["jit"])


class Forgetful(nn.Module):
    """A GRU that gives back the state it was given."""

    def __init__(self, gru):
        super().__init__()
        self.gru = gru
        self.num_layers, self.hidden_size, self.proj_size, self.bidirectional = 2, 16, 0, False

    def forward(self, x, h):
        return self.gru(x, h)[0], h


def test_a_forgotten_recurrent_state_is_caught(tmp_path, point_mass, monkeypatch, as_trained, recurrent_actor):
    from edenrl.export import graph

    original = graph._Recurrent.__init__
    monkeypatch.setattr(graph._Recurrent, "__init__", lambda self, rnn: original(self, Forgetful(rnn)))
    policy = as_trained(recurrent_actor(GRUModule))
    with pytest.raises(VerificationError, match="differs from the policy at control step 0: .* in h,"):
        export_policy(policy, point_mass, tmp_path, formats=["jit"])


def test_episodes_that_end_during_verification(tmp_path, as_trained, recurrent_actor):
    """The state of a row begins anew there, in the policy and in the replay."""
    policy = as_trained(recurrent_actor(GRUModule))
    export_policy(policy, wrap_env(PointMass(3, seed=0, max_steps=2)), tmp_path, formats=["jit"])


@pytest.mark.parametrize("python_based", [False, True])
def test_recurrent_policies_with_and_without_primers(tmp_path, point_mass, python_based, as_trained, recurrent_actor):
    from torchrl.envs import InitTracker

    policy = as_trained(recurrent_actor(GRUModule, python_based))
    export_policy(policy, point_mass, tmp_path / "a", formats=["jit"])
    primed = point_mass.append_transform(InitTracker()).append_transform(policy[1].make_tensordict_primer())
    export_policy(policy, primed, tmp_path / "b", formats=["jit"])
    graphs = [torch.jit.load(str(tmp_path / name / "policy.pt")) for name in "ab"]
    obs = torch.randn(2, 14)
    assert torch.equal(graphs[0](obs), graphs[1](obs))


class Smoother(nn.Module):
    """Reads and writes a state of its own: a moving average of the observation."""

    def forward(self, obs, average):
        average = 0.5 * average + 0.5 * obs
        return average, average


def test_a_state_of_ones_own(tmp_path, point_mass, as_trained):
    """Any module that reads ``k`` and writes ``("next", k)`` is recurrent."""
    policy = TensorDictSequential(
        TensorDictModule(Smoother(), in_keys=["observation", "average"], out_keys=["smooth", ("next", "average")]),
        *gaussian_actor({"smooth": 14}, 2, hidden=(16,)).module,
    )
    as_trained(policy)
    with pytest.raises(ValueError, match="carries 'average' from step to step .* Append a TensorDictPrimer"):
        export_policy(policy, point_mass, tmp_path, formats=["onnx"])
    primed = point_mass.append_transform(TensorDictPrimer(average=Unbounded(14), expand_specs=True))
    export_policy(policy, primed, tmp_path, formats=["onnx", "jit"])
    runtime = load_policy(tmp_path)
    assert runtime.spec["model"]["inputs"][1] == {"name": "average_in", "dtype": "float32", "shape": ["batch", 14]}
    runtime(torch.ones(2, 14).numpy())
    runtime.reset([0])
    runtime(torch.ones(2, 14).numpy())
    assert runtime.state["average_in"][:, 0].tolist() == [0.5, 0.75]


def test_a_state_that_is_written_after_the_action(tmp_path, point_mass):
    """It is carried although this step's action does not need it."""
    policy = TensorDictSequential(
        TensorDictModule(Smoother(), in_keys=["observation", "average"], out_keys=["smooth", "_"]),
        TensorDictModule(nn.Linear(14, 2), in_keys=["smooth"], out_keys=["action"]),
        TensorDictModule(nn.Tanh(), in_keys=["smooth"], out_keys=[("next", "average")]),
    )
    env = point_mass.append_transform(TensorDictPrimer(average=Unbounded(14), expand_specs=True))
    spec = json.loads(export_policy(policy, env, tmp_path, formats=["jit"])["spec"].read_text())
    assert [entry["name"] for entry in spec["model"]["inputs"]] == ["obs", "average_in"]
    assert [group["key"] for group in spec["observations"]] == ["observation"]


def test_a_state_that_starts_elsewhere_than_at_zero_is_refused(tmp_path, point_mass):
    policy = TensorDictSequential(
        TensorDictModule(Smoother(), in_keys=["observation", "average"], out_keys=["smooth", ("next", "average")]),
        TensorDictModule(nn.Linear(14, 2), in_keys=["smooth"], out_keys=["action"]),
    )
    primer = TensorDictPrimer(average=Unbounded(14), expand_specs=True, default_value=3.0)
    with pytest.raises(ValueError, match="starts the state 'average' with values other than zero"):
        export_policy(policy, point_mass.append_transform(primer), tmp_path, formats=["jit"])


def test_packages_installed_under_another_name(tmp_path, point_mass, monkeypatch):
    """onnxruntime-gpu is imported as onnxruntime and has no metadata of that name."""
    import importlib.metadata

    version = importlib.metadata.version

    def other(name):
        if name == "onnxruntime":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    import onnxruntime

    monkeypatch.setattr(importlib.metadata, "version", other)
    spec = export_policy(gaussian_actor({"observation": 14}, 2, hidden=(8,)), point_mass, tmp_path)["spec"]
    assert json.loads(spec.read_text())["provenance"]["versions"]["onnxruntime"] == onnxruntime.__version__


def test_links_to_elsewhere_are_not_taken_for_an_export(tmp_path, point_mass):
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "policy_spec.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(FileExistsError, match="which were not exported there"):
        export_policy(gaussian_actor({"observation": 14}, 2), point_mass, tmp_path / "out", formats=["jit"])


def test_several_groups_keep_the_order_of_the_policy(tmp_path, point_mass, as_trained):
    """Also one that only a value head reads stays out of the file."""
    from torchrl.envs import CatTensors, RenameTransform

    env = point_mass.append_transform(RenameTransform(["observation"], ["second"], create_copy=True))
    env = env.append_transform(CatTensors(["observation", "second"], "first", del_keys=False))
    critic = TensorDictModule(nn.Linear(14, 1), in_keys=["observation"], out_keys=["state_value"])
    policy = TensorDictSequential(critic, *gaussian_actor({"second": 14, "first": 28}, 2, hidden=(16,)).module)
    as_trained(policy)
    export_policy(policy, env, tmp_path, formats=["onnx"])
    spec = PolicySpec.model_validate_json((tmp_path / "policy_spec.json").read_text())
    assert [(o.key, o.start, o.stop, o.transforms) for o in spec.observations] == [
        ("second", 0, 14, ["RenameTransform"]),
        ("first", 14, 42, ["RenameTransform", "CatTensors"]),
    ]
    first, second = torch.randn(28).numpy(), torch.randn(14).numpy()
    runtime = load_policy(tmp_path)
    mixed, ordered = runtime({"first": first, "second": second}), runtime([*second, *first])
    assert (mixed == ordered).all()


class Whole(TensorDictModuleBase):
    """A policy with a forward of its own, which no sequence describes."""

    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(14, 2)

    def forward(self, td):
        return td.set("action", self.net(td["observation"]))


class Telling(Whole):
    def export_module(self):
        return TensorDictModule(self.net, in_keys=["observation"], out_keys=["action"])


class Mistaken(Whole):
    def export_module(self):
        return self.net


def test_a_policy_says_how_it_is_exported(tmp_path, point_mass):
    with pytest.raises(TypeError, match=r"Whole cannot be exported as it is\. Give it a method export_module\(\)"):
        export_policy(Whole(), point_mass, tmp_path)
    with pytest.raises(TypeError, match=r"Mistaken.export_module\(\) returned a Linear"):
        export_policy(Mistaken(), point_mass, tmp_path)
    export_policy(Telling(), point_mass, tmp_path, formats=["jit"])


def test_a_policy_that_cannot_be_traced_is_named(tmp_path, point_mass):
    class Picky(GaussianMLP):
        def forward(self, obs):
            return super().forward(obs) if obs.sum().item() > 1e9 else super().forward(obs + 1)

    policy = gaussian_actor({"observation": 14}, 2)
    policy.module[0].module = Picky(14, 2)
    with pytest.raises(TypeError, match="cannot be written as 'pt2'.*\n?.*"):
        export_policy(policy, point_mass, tmp_path, formats=["pt2"])
    assert not files_of(tmp_path)


def test_unknown_distributions_are_refused_by_name(tmp_path, point_mass):
    net = nn.Sequential(nn.Linear(14, 4), NormalParamExtractor())
    policy = ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TruncatedNormal,
    )
    with pytest.raises(TypeError, match="distribution TruncatedNormal cannot be exported; known are .*TanhNormal"):
        export_policy(policy, point_mass, tmp_path)


def test_without_verification_the_spec_says_so(tmp_path, point_mass, as_trained):
    policy = as_trained(gaussian_actor({"observation": 14}, 2, hidden=(16,)))
    export_policy(hooked(policy, without_normalizer), point_mass, tmp_path, formats=["jit"], verify=False)
    assert json.loads((tmp_path / "policy_spec.json").read_text())["model"]["verification"] is None


def test_the_checkpoint_is_recorded(tmp_path, point_mass):
    import hashlib

    policy = gaussian_actor({"observation": 14}, 2)
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "b").write_bytes(b"two")
    (tmp_path / "checkpoint-7" / "a").write_bytes(b"one")
    for path, content in (("checkpoint-7", b"a\0oneb\0two"), ("checkpoint-7/a", b"one")):
        export_policy(policy, point_mass, tmp_path / "out", formats=["jit"], checkpoint=tmp_path / path, task="T")
        origin = json.loads((tmp_path / "out" / "policy_spec.json").read_text())["provenance"]
        assert origin["checkpoint_sha256"] == hashlib.sha256(content).hexdigest()
        assert (origin["checkpoint"], origin["task"]) == (path.split("/")[-1], "T")


@pytest.mark.parametrize("formats", [["onxx"], [], ["jit", "jit"], "jit"])
def test_unknown_formats_are_refused(tmp_path, point_mass, formats):
    with pytest.raises(ValueError, match=r"expected different names out of \['onnx', 'jit', 'pt2'\]"):
        export_policy(gaussian_actor({"observation": 14}, 2), point_mass, tmp_path / "out", formats=formats)
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_named_before_anything_is_built(tmp_path, point_mass, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "onnxscript" else find_spec(name, *a)
    )
    policy = gaussian_actor({"observation": 14}, 2)
    with pytest.raises(ImportError, match=r'needs onnxscript, not installed: pip install "edenrl\[onnx\]"'):
        export_policy(policy, point_mass, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_policy(policy, point_mass, tmp_path / "out", formats=["jit"])["jit"].exists()


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
@pytest.mark.parametrize("error", [ImportError("libonnx.so: cannot open"), OSError("bad ELF"), AttributeError("ABI")])
def test_a_package_that_cannot_be_imported_is_named_before_anything_is_built(tmp_path, monkeypatch, package, error):
    import_module = importlib.import_module

    def broken(name, *args):
        if name == package:
            raise error
        return import_module(name, *args)

    monkeypatch.setattr(importlib, "import_module", broken)
    # Neither the policy nor the environment is looked at.
    with pytest.raises(ImportError, match=f"needs {package}, which is installed but cannot be imported") as caught:
        export_policy(None, None, tmp_path / "out")
    assert str(error) in str(caught.value) and caught.value.__cause__ is error
    assert not (tmp_path / "out").exists()


def test_without_verification_onnxruntime_is_not_needed(tmp_path, point_mass, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    policy = gaussian_actor({"observation": 14}, 2, hidden=(8,))
    with pytest.raises(ImportError, match="onnxruntime"):
        export_policy(policy, point_mass, tmp_path / "out")
    files = export_policy(policy, point_mass, tmp_path / "out", verify=False)
    spec = json.loads(files["spec"].read_text())
    assert spec["model"]["verification"] is None and "onnxruntime" not in spec["provenance"]["versions"]
    assert files["onnx"].exists()


def test_a_folder_that_cannot_be_written_to(tmp_path, point_mass):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    user = os.geteuid()
    if user == 0:  # to root nothing is read-only
        for parent in (tmp_path, *tmp_path.parents):
            if not parent.stat().st_mode & 0o001 and parent.owner() == "root":
                parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:  # only what touches the folder: the packages themselves may be readable by root alone
        with pytest.raises(PermissionError, match="locked cannot be written to, .* Choose another folder"):
            with staging(folder, ["policy.pt"]):
                pass
    finally:
        os.seteuid(user)
    (tmp_path / "file").write_text("")
    with pytest.raises(PermissionError, match="file cannot be written to,"):
        export_policy(gaussian_actor({"observation": 14}, 2), point_mass, tmp_path / "file", formats=["jit"])


def test_an_environment_that_the_policy_cannot_read(tmp_path, point_mass):
    with pytest.raises(
        ValueError, match=r"reads the observation group 'policy', .* it publishes {'observation': \(14,\)"
    ):
        export_policy(gaussian_actor({"policy": 14}, 2), point_mass, tmp_path)
    with pytest.raises(ValueError, match=r"cannot read this environment, .* {'observation': \(14,\)}.* was trained in"):
        export_policy(gaussian_actor({"observation": 13}, 2), point_mass, tmp_path)
    other = TensorDictModule(nn.Linear(14, 2), in_keys=["observation"], out_keys=["torque"])
    with pytest.raises(ValueError, match="not the environment's action 'action'"):
        export_policy(other, point_mass, tmp_path)
    assert not files_of(tmp_path)


def test_stale_formats_disappear_and_copies_are_not_overwritten(tmp_path, point_mass):
    policy = gaussian_actor({"observation": 14}, 2)
    assert set(export_policy(policy, point_mass, tmp_path / "a", formats=["jit", "pt2"])) == {"jit", "pt2", "spec"}
    (tmp_path / "a" / "notes.txt").write_text("mine")
    export_policy(policy, point_mass, tmp_path / "a", formats=["jit"])
    assert set(files_of(tmp_path / "a")) == {"policy.pt", "policy_spec.json", "notes.txt"}
    assert not (tmp_path / "a" / "policy.pt2").is_symlink()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "policy.pt").write_bytes((tmp_path / "a" / "policy.pt").read_bytes())
    with pytest.raises(FileExistsError, match=r"holds \['policy.pt'\], which were not exported there"):
        export_policy(policy, point_mass, tmp_path / "copy", formats=["jit"])
