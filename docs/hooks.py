"""MkDocs hook: shows mkdocstrings the package as it is installed.

The API pages are built from the source files, where `edenrl.objectives` and `edenrl.collectors` lie beside `edenrl`
instead of inside it. The hook lays links to the three folders out in a temporary folder as a wheel would, so that the
site builds from any checkout, installed or not.
"""

import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parent.parent
# Kept for the life of the process: `mkdocs serve` builds many times.
STAGE = tempfile.TemporaryDirectory(prefix="edenrl-docs-")


def on_startup(command: str, dirty: bool) -> None:
    """Link the library folders into one package."""
    package = Path(STAGE.name, "edenrl")
    package.mkdir()
    for entry in (ROOT / "edenrl").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("objectives", "collectors"):
        (package / name).symlink_to(ROOT / name)


@event_priority(100)  # before mkdocstrings reads its own settings
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Point mkdocstrings at the staged package, and the live reload at the real folders."""
    python = config.plugins["mkdocstrings"].config.handlers["python"]
    python["paths"] = [STAGE.name]
    config.watch += [str(ROOT / name) for name in ("edenrl", "objectives", "collectors")]
    return config
