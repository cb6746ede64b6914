"""What pyproject.toml ships: each package of the source and each config group."""

import tomllib
from pathlib import Path

from helpers.commands import ROOT


def test_every_package_and_config_group_is_shipped() -> None:
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = _packages("adloco_dist", ROOT / "src" / "adloco_dist")
    assert set(shipped) == packages | _packages("adloco_dist.conf", ROOT / "conf")


def _packages(name: str, root: Path) -> set[str]:
    folders = [folder for folder in root.rglob("*") if folder.is_dir() and folder.name != "__pycache__"]
    return {name} | {".".join((name, *folder.relative_to(root).parts)) for folder in folders}
