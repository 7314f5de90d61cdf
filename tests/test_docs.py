"""What the README, the pages and the docstrings promise."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from edenrl.envs import registry

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = {"edenrl": "edenrl", "objectives": "edenrl.objectives", "collectors": "edenrl.collectors"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a Markdown file in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def module_names() -> list[str]:
    """Every module of the library, from the files, so that none can be left out."""
    names = set()
    for folder, package in LIBRARY.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            names.add(".".join([package, *(part for part in parts if part != "__init__")]))
    return sorted(names)


def rooms() -> set[str]:
    """The public packages and modules directly under `edenrl`."""
    return {name for name in module_names() if name.count(".") == 1 and not name.split(".")[1].startswith("_")}


@pytest.mark.parametrize("name", module_names())
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0, "see the captured output"


def test_the_python_blocks_of_the_readme_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    samples = blocks(ROOT / "README.md", "python")
    assert samples, "the README shows no code"
    for sample in samples:
        exec(compile(sample, "README.md", "exec"), {"__name__": "readme"})


PAGES = sorted(page for page in (ROOT / "docs" / "pages").rglob("*.md") if blocks(page, "python"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_blocks_of_a_page_run_as_pasted(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One after the other, as a reader pastes them into one session.

    The first line of a block may say what is special about it: ``# pip install PACKAGE``, a package that need not be
    here, or ``# NAME.py``, a file that the reader saves.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    scope: dict[str, object] = {"__name__": "page"}
    for number, sample in enumerate(blocks(page, "python"), 1):
        if (name := sample.splitlines()[0].removeprefix("# ")).endswith(".py"):
            (tmp_path / name).write_text(sample)
        try:
            exec(compile(sample, f"{page.name}, block {number}", "exec"), scope)
        except ImportError:
            if not sample.startswith("# pip install "):
                raise


def test_the_continuous_integration_runs_the_commands_of_the_readme() -> None:
    """Arguments may follow (a full training would take too long); words may not change."""
    commands = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines() if line.strip()]
    script = {line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()}
    assert 'pip install -e ".[all]"' in commands
    assert "pytest" in commands
    assert "python examples/train_ppo.py" in commands
    for command in commands:
        with_arguments = command.startswith("python ") and any(line.startswith(f"{command} ") for line in script)
        assert command in script or with_arguments, f"add {command!r} to .ci/run"


def test_every_room_has_its_page_and_every_page_its_place() -> None:
    pages = ROOT / "docs" / "pages"
    text = "\n".join(page.read_text() for page in (pages / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)", text, flags=re.MULTILINE))
    assert shown == rooms(), "each module directly under edenrl has `::: edenrl.<name>` in docs/pages/api/<name>.md"
    listed = set(re.findall(r"\S+\.md", (ROOT / "docs" / "mkdocs.yml").read_text()))
    assert {page.relative_to(pages).as_posix() for page in pages.rglob("*.md")} == listed


def test_links_to_files_lead_somewhere() -> None:
    links = [
        (page, link)
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for link in re.findall(r"\]\(([^)#\s]+)", re.sub(r"(?ms)^```.*?^```", "", page.read_text()))  # not in code
        if "://" not in link
    ]
    assert links
    assert [(page, link) for page, link in links if not (page.parent / link).exists()] == []


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "pages" / "architecture.md").read_text()
    paths = re.findall(r"^\| `(\S+)` \|", page, flags=re.MULTILINE)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
