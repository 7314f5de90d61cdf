"""The rooms of the repository: what stands where, and what may import what."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

TOP_LEVEL = {
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "collectors",
    "docs",
    "edenrl",
    "examples",
    "objectives",
    "pyproject.toml",
    "tests",
}
LIBRARY = ("edenrl", "objectives", "collectors")
# What a room may import of ours, itself included. `edenrl` stands for its other rooms.
MAY_IMPORT = {
    "edenrl.modules": ("edenrl.modules",),
    "edenrl.optim": ("edenrl.optim",),
    "edenrl.objectives": ("edenrl.objectives", "edenrl.modules"),
    "edenrl.collectors": ("edenrl.collectors", "edenrl.modules", "edenrl.envs", "edenrl._files"),
}
UPWARD = ("edenrl.objectives", "edenrl.collectors")
# Never importable by these names from an installed package.
OUTSIDE = ("examples", "tests", "docs", "objectives", "collectors")


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def library_files(root: Path) -> list[Path]:
    return [path for room in LIBRARY for path in sorted((root / room).rglob("*.py"))]


def module_name(path: Path, root: Path) -> str:
    """The name a library file is imported by, e.g. `edenrl.objectives.ppo` for `objectives/ppo.py`."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] != "edenrl":
        parts = ("edenrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, name: str) -> Iterator[str]:
    """Every module the import statements of a file may load, relative ones resolved."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from edenrl import objectives` loads a module that only the imported name shows.
            yield from (f"{source}.{alias.name}" for alias in node.names)


def wrong_imports(root: Path) -> list[str]:
    wrong = []
    for path in library_files(root):
        name = module_name(path, root)
        room = next((room for room in MAY_IMPORT if within(name, (room,))), None)
        for module in imported(path, name):
            if within(module, ("edenrl",)):
                allowed = within(module, MAY_IMPORT[room]) if room else not within(module, UPWARD)
            else:
                allowed = not within(module, OUTSIDE)
            if not allowed:
                wrong.append(f"{path.relative_to(root)} imports {module}")
    return wrong


def test_nothing_imports_upward(root: Path) -> None:
    assert wrong_imports(root) == []


@pytest.mark.parametrize(
    ("file", "statement", "module"),
    [
        ("edenrl/training/a.py", "from edenrl.objectives import PPOLoss", "edenrl.objectives.PPOLoss"),
        ("edenrl/config.py", "from edenrl import collectors", "edenrl.collectors"),
        ("edenrl/config.py", "def f():\n    import edenrl.objectives.ppo", "edenrl.objectives.ppo"),
        ("edenrl/envs/__init__.py", "from ..objectives import PPOLoss", "edenrl.objectives.PPOLoss"),
        ("edenrl/envs/a.py", "from examples.train_ppo import Config", "examples.train_ppo.Config"),
        ("edenrl/modules/a.py", "import edenrl.config", "edenrl.config"),
        ("edenrl/optim.py", "from .modules import MLP", "edenrl.modules.MLP"),
        ("objectives/a.py", "from edenrl.optim import make_optimizer", "edenrl.optim.make_optimizer"),
        ("objectives/a.py", "from ..collectors import b", "edenrl.collectors.b"),
        ("collectors/a.py", "from edenrl.training import evaluate", "edenrl.training.evaluate"),
        ("collectors/a.py", "from objectives import ppo", "objectives.ppo"),
    ],
)
def test_an_upward_import_is_found(tmp_path: Path, file: str, statement: str, module: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(statement)
    assert wrong_imports(tmp_path) == [f"{file} imports {module}"]


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("edenrl/training/a.py", "from edenrl.config import Config\nfrom .b import c\nimport torch"),
        ("objectives/a.py", "from edenrl.modules import MLP\nfrom .ppo import PPOLoss"),
        ("collectors/a.py", "from edenrl import envs, modules\nfrom torchrl.collectors import Collector"),
    ],
)
def test_a_downward_import_is_allowed(tmp_path: Path, file: str, statement: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(statement)
    assert wrong_imports(tmp_path) == []


def test_the_top_level_is_fixed(root: Path) -> None:
    """Files that git tracks or would track; dot files are free."""
    if not (root / ".git").exists():
        pytest.skip("needs a git checkout")
    # safe.directory: the checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    entries = {file.split("/")[0] for file in files}
    assert {entry for entry in entries if not entry.startswith(".")} == TOP_LEVEL


def test_every_public_name_has_a_docstring(root: Path) -> None:
    bare = []
    for path in library_files(root):
        tree = ast.parse(path.read_text(), str(path))
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        bare += [f"{path.relative_to(root)}: {node.name}" for node in public if not ast.get_docstring(node)]
        if not ast.get_docstring(tree):
            bare.append(f"{path.relative_to(root)}: the module")
    assert bare == []


def test_the_library_does_not_print(root: Path) -> None:
    """Only the progress lines of a run go to standard output."""
    prints = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in library_files(root)
        if not path.is_relative_to(root / "edenrl" / "training")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []


def test_a_trainer_script_reads_at_a_glance(root: Path) -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in (root / "examples").glob("train_*.py")}
    assert lengths.pop("train_ppo.py") <= 60
    assert {name: lines for name, lines in lengths.items() if lines > 80} == {}
