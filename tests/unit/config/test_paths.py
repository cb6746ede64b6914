"""Paths on the command line: what the shell gave whole is taken as it stands, or the line to type is shown."""

import re
import subprocess
from pathlib import Path

import pytest

from adloco_dist.config import SettingsError
from adloco_dist.config.compose import compose
from adloco_dist.config.paths import with_quoted_paths
from adloco_dist.sweep.points import expand

NAMES = [
    "plain", "a=b", "ü ä", "it's", "[1]", "a[1]", "a,b", "a::b", "x:y", "{a}", "(a)", "f(a)", "1e3", "1_0", "true",
    'say "so"', "a b ", "back\\slash", "end\\", "#1", "~", "a;b", "*", "null", "日本", "a\\'b", "$a", "a&b", "a\tb",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_path_that_exists_is_taken_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    for other in ("b.txt", "c,d"):
        (tmp_path / other).touch()
    absolute, relative = f"{tmp_path}/{name}", f"./{name}"
    for path, written, train in (
        (absolute, f"[{absolute}]", [absolute]),
        (absolute, absolute, [absolute]),
        (relative, f"[./b.txt,{relative},./c,d]", ["./b.txt", relative, "./c,d"]),
    ):
        folders = [f"run.directory={path}-of-runs/x", f"run.root={path}-of-runs/x"] if "," not in name else []
        named = ["model=pretrained", f"model.warm_start={path}", f"data.tokenizer={path}", *folders]
        settings = compose(["data=text", f"data.train={written}", *named])
        assert settings.data.train == train
        assert settings.model.warm_start == settings.data.tokenizer == path
        if folders:
            assert settings.run.directory == settings.run.root == f"{path}-of-runs/x"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", ["data.train", "model.warm_start", "data.tokenizer"])
def test_the_line_that_is_shown_works_when_a_shell_reads_it(tmp_path: Path, setting: str, name: str) -> None:
    path = f"{tmp_path}/{name}"
    given = f"{setting}=[{path}]" if setting == "data.train" else f"{setting}={path}"
    more = ["data=text"] if setting == "data.train" else ["model=pretrained", "model.warm_start=x"]
    try:
        settings = compose([*more, given])
    except SettingsError as error:
        (shown,) = re.findall(r"type (.*)$", str(error), re.DOTALL)
        typed = subprocess.run(["sh", "-c", f"printf %s {shown}"], capture_output=True, text=True, check=True).stdout
        settings = compose([*more, typed])
    found = {
        "data.train": ",".join(settings.data.train),
        "model.warm_start": settings.model.warm_start,
        "data.tokenizer": settings.data.tokenizer,
    }
    shown = path.split(",") if setting == "data.train" else [path]  # which commas part files, nobody can say
    assert found[setting] == ",".join(part.strip() for part in shown)


@pytest.mark.parametrize(
    "override",
    [
        "data.train=[a.txt,b.txt]", "data.train=['a b.txt']", 'data.train=["a","b"]', "data.train=[a],[b]",
        "data.train=[train]", "data.train=[]", "data.train=[*.txt]", "model.warm_start=null", "model.warm_start=a,b",
        "model.warm_start=a/b", "model.warm_start='x y'", "run.root=a,b", "run.directory=null", "run.directory=runs/x",
        "run.directory=${oc.env:HOME}/x", "data.train=[${oc.env:HOME}/x]", "run.directory='a b'", "run.directory=",
        "run.root=choice(a,b)", "inner.lr=1e3", "tracking.project=a=b", "data.train", "~data.train", "model=nano",
    ],
)  # fmt: skip
def test_what_hydra_reads_keeps_its_meaning(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "train", "a.txt", "b.txt", "a b.txt"):
        (tmp_path / name).touch()
    assert with_quoted_paths(override) == override


def test_sweeps_over_such_paths(tmp_path: Path) -> None:
    for name in ("ü.txt", "it's.txt", "c=d.txt"):
        (tmp_path / name).touch()
    one, two, three = (f"{tmp_path}/{name}" for name in ("ü.txt", "it's.txt", "c=d.txt"))
    points, _ = expand(["data=text", f"data.train=[{one},{two}],[{three}]", f"hydra.sweep.dir={tmp_path}/ö x/y"])
    assert [compose(point.overrides).data.train for point in points] == [[one, two], [three]]
    assert {point.directory.parent for point in points} == {tmp_path / "ö x" / "y"}
    points, _ = expand(["model=pretrained", f"model.warm_start={one},{two}"])
    assert [compose(point.overrides).model.warm_start for point in points] == [one, two]
    points, _ = expand(["data=text", f"data.train={one},{three}"])
    assert [compose(point.overrides).data.train for point in points] == [[one], [three]]


@pytest.mark.parametrize(
    ("override", "detail"),
    [
        (f"run.directory={'a' * 300}", "has 300 bytes, 300 of them in one name; a path has at most 4,095, a name 255"),
        (f"data.train=[{'a/' * 3000}]", "has 6,000 bytes, 1 of them in one name"),
        ("run.directory=r\udcff", ": has bytes that are no text in this locale"),
        (f"model.warm_start='{'é' * 200}'", "has 400 bytes, 400 of them in one name"),
    ],
)
def test_paths_that_cannot_be(override: str, detail: str) -> None:
    with pytest.raises(SettingsError) as refused:
        compose(["data=text" if "data" in override else "model=tiny", override])
    assert detail in str(refused.value)
    assert len(str(refused.value)) < 500
