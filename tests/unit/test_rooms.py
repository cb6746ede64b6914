"""Lower rooms never import higher ones (docs/architecture.md, "Rooms"), and files stay readable in one sitting."""

import ast
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import adloco_dist

PACKAGE = Path(adloco_dist.__file__).parent
NAMES_TRANSFORMERS = re.compile(r"^\s*(import|from) transformers\b", re.MULTILINE)
LIBRARY = {
    "text": 0,
    "vectors": 0,
    "schema": 0,
    "buffers": 0,
    "averaging": 1,
    "members": 2,
    "noise": 1,
    "diloco": 3,
    "noise_scale": 2,
}
"""What anybody's loop may import: it needs torch alone."""
INTEGRATIONS = {"integrations": 4}
"""The library in other people's loops, each of whose frameworks one file imports."""
FRAMEWORKS = {"ranks": set(), "trainer": {"transformers", "safetensors"}}
"""What its files import beside the library."""
LAUNCHER = {
    "addresses": 3,
    "terminal": 3,
    "messages": 3,
    "config": 4,
    "policy": 5,
    "data": 5,
    "cluster": 6,
    "objective": 6,
    "pool": 7,
    "command": 7,
    "run": 7,
    "round": 8,
    "checkpoint": 8,
    "baselines": 9,
    "setup": 10,
    "train": 11,
    "report": 12,
    "tools": 12,
    "sweep": 13,
    "launch": 14,
}
FLOORS = LIBRARY | INTEGRATIONS | LAUNCHER


LONGEST_CHAIN = 8
"""Rooms that import each other in a row, at most."""


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imported_modules(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it, and names that it imports from them: these may be modules, too."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            modules |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def imported_rooms(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported_modules(path) if name.startswith("adloco_dist.")} & FLOORS.keys()


def modules_of_the_package() -> dict[str, Path]:
    """Every file by the name of its module, without the package's own name."""
    files = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def circles(arrows: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """The strongly connected components of more than one node (Tarjan, 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[frozenset[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        stack.append(node)
        for other in arrows[node]:
            if other not in numbers:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == numbers[node]:
            start = stack.index(node)
            components.append(frozenset(stack[start:]))
            del stack[start:]

    for node in arrows:
        if node not in numbers:
            visit(node)
    return [component for component in components if len(component) > 1]


def longest_chain(arrows: Mapping[str, set[str]]) -> list[str]:
    """The most nodes in a row each of which has an arrow to the next."""

    @cache
    def from_node(node: str) -> list[str]:
        return [node, *max((from_node(other) for other in arrows[node]), key=len, default=[])]

    return max(map(from_node, arrows), key=len)


def test_no_file_imports_in_a_circle() -> None:
    """Imports inside functions count: a circle that is closed late is one for who reads it."""
    paths = modules_of_the_package()
    arrows = {
        name: {other for module in imported_modules(path) if (other := module.removeprefix("adloco_dist.")) in paths}
        - {name}
        for name, path in paths.items()
    }
    assert circles(arrows) == []


def test_rooms_do_not_stand_in_one_long_chain() -> None:
    arrows: dict[str, set[str]] = {name: set() for name in FLOORS}
    for path in modules_of_the_package().values():
        arrows[room(path)] |= imported_rooms(path) - {room(path)}
    chain = longest_chain(arrows)
    assert len(chain) <= LONGEST_CHAIN, " -> ".join(chain)


def test_arrows_point_down() -> None:
    upward = [
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" or path.parent != PACKAGE
        for other in imported_rooms(path)
        if other != room(path) and FLOORS[other] >= FLOORS[room(path)]
    ]
    assert upward == []


def test_the_library_needs_torch_alone() -> None:
    beyond = [
        f"{path.relative_to(PACKAGE)} imports {module}"
        for path in PACKAGE.rglob("*.py")
        if room(path) in LIBRARY
        for module in imported_modules(path)
        if module.split(".")[0] not in {"torch", "adloco_dist", *sys.stdlib_module_names}
    ]
    assert beyond == []


def test_integrations_need_the_library_and_their_own_framework() -> None:
    for path in (PACKAGE / "integrations").glob("*.py"):
        others = {module.split(".")[0] for module in imported_modules(path)} - sys.stdlib_module_names
        assert others - {"torch", "adloco_dist"} == FRAMEWORKS.get(path.stem, set()), path
        assert imported_rooms(path) <= LIBRARY.keys() | INTEGRATIONS.keys(), path


def test_settings_and_decisions_need_no_torch() -> None:
    noise = [PACKAGE / "noise" / f"{name}.py" for name in ("__init__", "statistics", "requests")]  # they stand on these
    for path in [*(PACKAGE / "config").glob("*.py"), *(PACKAGE / "policy").glob("*.py"), *noise]:
        assert "import torch" not in path.read_text(encoding="utf-8"), path


def test_models_of_transformers_are_an_affair_of_one_objective() -> None:
    """Tokenizers are transformers' too: they belong to the data. Its Trainer is a loop, not a model."""
    others = (PACKAGE / "data" / "encoding.py", PACKAGE / "integrations" / "trainer.py")
    allowed = {*others, *(PACKAGE / "objective").iterdir(), *(PACKAGE / "tools").iterdir()}
    importing = [path for path in PACKAGE.rglob("*.py") if NAMES_TRANSFORMERS.search(path.read_text(encoding="utf-8"))]
    assert [path for path in importing if path not in allowed] == []


def test_files_stay_under_300_lines() -> None:
    root = PACKAGE.parent.parent
    files = [
        *PACKAGE.rglob("*.py"),
        *(path for name in ("tests", "bench", "gpu", "examples") for path in (root / name).rglob("*.py")),
    ]
    assert {str(path): length for path in files if (length := len(path.read_text().splitlines())) > 300} == {}


def test_one_room_prints() -> None:
    """What is safe for closed streams and odd strings there would not be elsewhere."""
    elsewhere = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if room(path) != "terminal"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console")
    ]
    assert elsewhere == []


def test_a_circle_and_a_chain_are_found() -> None:
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set[str]()}
    assert circles(arrows) == [frozenset({"b", "c"})]
    assert longest_chain(arrows | {"c": {"d"}}) == ["a", "b", "c", "d"]
