"""The built packages, used from outside the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import edenrl

LIBRARY = {"edenrl": "edenrl", "objectives": "edenrl/objectives", "collectors": "edenrl/collectors"}
EXTRAS = ("matplotlib", "mujoco", "onnx", "onnxruntime", "onnxscript", "ray", "tensorboard", "wandb")
SOURCES = (*LIBRARY, "tests", "examples", "docs", "pyproject.toml", "README.md", "LICENSE")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

for extra in {extras!r}:
    sys.modules[extra] = None  # any import of it raises ImportError, as if it were not installed

import edenrl, edenrl.collectors, edenrl.objectives

for room in (edenrl, edenrl.objectives, edenrl.collectors):
    for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
        importlib.import_module(found.name)
print(*(module.__file__ for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "edenrl"), sep="\\n")
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command far from the checkout's import path and return what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-build-isolation", cwd=cwd)


def build_wheel(source: Path, folder: Path) -> Path:
    pip("wheel", source, "--wheel-dir", folder, cwd=folder.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


def package_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def source(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: a build leaves files behind, and stale ones would get into the wheel."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("built") / "wheel")


def test_the_wheel_holds_the_three_rooms_and_nothing_else(root: Path, wheel: Path) -> None:
    expected = {
        f"{installed}/{path.relative_to(root / folder).as_posix()}"
        for folder, installed in LIBRARY.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files = package_files(wheel)
    assert files == expected, "a new sub-package goes into `packages`, a data file into `package-data` (pyproject.toml)"
    assert {"edenrl/py.typed", "edenrl/objectives/__init__.py", "edenrl/collectors/__init__.py"} <= files
    assert {name.split("/")[0] for name in files} == {"edenrl"}


def test_the_wheel_carries_version_licence_and_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = f"edenrl-{edenrl.__version__}.dist-info"
        assert archive.read(f"{info}/licenses/LICENSE").startswith(b"MIT License")
        metadata = archive.read(f"{info}/METADATA").decode().splitlines()
    extras = {line.split()[1] for line in metadata if line.startswith("Provides-Extra")}
    assert extras == {"onnx", "wandb", "tensorboard", "mujoco", "plot", "ray", "test", "docs", "all"}
    assert "Requires-Dist: torchrl<0.15,>=0.14" in metadata


def test_an_installed_wheel_imports_without_the_checkout_and_the_extras(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", wheel, "--target", site, cwd=tmp_path)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\n" + IMPORT_EVERYTHING.format(extras=EXTRAS)
    files = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert str(site / "edenrl/objectives/__init__.py") in files
    assert str(site / "edenrl/collectors/__init__.py") in files
    assert [file for file in files if not Path(file).is_relative_to(site)] == []


def test_importing_edenrl_is_light(wheel: Path, tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(wheel)!r}); import edenrl; print(edenrl.__file__);"
        f"print([name for name in {('torch', 'numpy', 'gymnasium', *EXTRAS)!r} if name in sys.modules])"
    )
    # -S keeps what other packages load at start-up (.pth files) out of the answer.
    file, loaded = run(sys.executable, "-S", "-c", code, cwd=tmp_path).splitlines()
    assert file.startswith(str(wheel))
    assert loaded == "[]"


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    rebuilt = build_wheel(tmp_path / archive.name.removesuffix(".tar.gz"), tmp_path / "wheel")
    assert rebuilt.name == wheel.name
    assert package_files(rebuilt) == package_files(wheel)


def test_an_editable_install_follows_the_checkout(source: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--target", site, "--editable", source, cwd=tmp_path)
    code = f"""
import importlib.util, site
site.addsitedir({str(site)!r})
for name in ("edenrl", "edenrl.objectives", "edenrl.collectors"):
    print(importlib.util.find_spec(name).origin)
print(importlib.util.find_spec("objectives"), importlib.util.find_spec("collectors"))
"""
    # -S leaves out the environment's own packages, where edenrl may be installed from another folder.
    *origins, bare = run(sys.executable, "-S", "-c", code, cwd=tmp_path).splitlines()
    assert origins == [str(source / room / "__init__.py") for room in LIBRARY]
    assert bare == "None None"
