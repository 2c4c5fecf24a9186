"""The place of the project and the folders of its tests, which a process that a test starts imports from."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = sorted({path.parent for path in TESTS.rglob("*.py")})
