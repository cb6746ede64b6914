"""The house: lower floors never import higher ones (design, section 5), and files stay readable in one sitting."""

import ast
from pathlib import Path

import adloco_dist

PACKAGE = Path(adloco_dist.__file__).parent
FLOORS = {
    "terminal": 0,
    "addresses": 0,
    "config": 1,
    "decisions": 2,
    "data": 2,
    "shapes": 2,
    "attention": 2,
    "losses": 3,
    "models": 4,
    "cluster": 3,
    "pool": 4,
    "round": 5,
    "run": 5,
    "command": 4,
    "hosting": 6,
    "preflight": 6,
    "checkpointing": 7,
    "train": 8,
    "tools": 9,
    "testing": 9,
    "launch": 10,
}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        rooms |= {name.split(".")[1] for name in names if name.startswith("adloco_dist.")}
    return rooms


def test_arrows_point_down() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent != PACKAGE
        for other in imported_rooms(path)
        if other != room(path) and FLOORS[other] >= FLOORS[room(path)]
    ]
    assert upward == []


def test_settings_and_decisions_need_no_torch() -> None:
    for wing in ("config", "decisions"):
        for path in (PACKAGE / wing).glob("*.py"):
            assert "import torch" not in path.read_text(encoding="utf-8"), path


def test_files_stay_under_300_lines() -> None:
    root = PACKAGE.parent.parent
    files = [
        *PACKAGE.rglob("*.py"),
        *(path for name in ("tests", "bench", "gpu") for path in (root / name).rglob("*.py")),
    ]
    assert {str(path): length for path in files if (length := len(path.read_text().splitlines())) > 300} == {}


def test_one_room_prints() -> None:
    """What is safe for closed streams and odd strings there would not be elsewhere."""
    elsewhere = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if room(path) not in ("terminal", "testing")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console")
    ]
    assert elsewhere == []
