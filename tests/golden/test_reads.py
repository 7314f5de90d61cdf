"""Every published number is read by some test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TESTS = sorted(path for path in FOLDER.parent.rglob("test_*.py") if "\nGOLDEN = " in path.read_text())


class Reads:
    """Lets pytest run the tests that take ``golden`` alone, and keeps what they read, by file."""

    def __init__(self) -> None:
        self.unread: dict[Path, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if "golden" in item.fixturenames]  # type: ignore[attr-defined]

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        golden = item.funcargs["golden"]  # type: ignore[attr-defined]
        self.unread.setdefault(golden.path, set(golden.names)).difference_update(golden.read)


# Runs them once more, in this process: with several, none sees all that the others read.
@pytest.mark.parametrize("name", sorted({path.stem for path in FOLDER.rglob("*.npz")}))
def test_every_number_is_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    users = [str(path) for path in TESTS if re.search(rf'^GOLDEN = "{name}"$', path.read_text(), re.MULTILINE)]
    reads = Reads()
    assert pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *users], plugins=[reads]) == pytest.ExitCode.OK
    assert set(reads.unread) == set(FOLDER.rglob(f"{name}.npz"))
    assert not any(reads.unread.values()), {path.parent.name: sorted(left) for path, left in reads.unread.items()}
