"""A hub that is out of reach is noticed once, before libraries try for a minute."""

import os
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from adloco_dist.data.hub import OFFLINE, prefer_cache_without_hub, split_subset


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose user has set nothing."""
    for name in (OFFLINE, "http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_hub_that_refuses_leaves_the_cache(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    prefer_cache_without_hub(None, "nobody/nothing")
    assert os.environ[OFFLINE] == "1", "for the libraries of this process and of its ranks"
    assert constants.is_offline_mode(), "of one that is imported already, too"
    assert capsys.readouterr().err.count("127.0.0.1 is out of reach (Connection refused)") == 1


def test_a_hub_that_answers_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        prefer_cache_without_hub("nobody/nothing")
    assert OFFLINE not in os.environ
    assert not constants.is_offline_mode()


def test_nothing_is_tried_for_what_is_here_or_behind_a_proxy_or_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    prefer_cache_without_hub(None, str(tmp_path), f"{tmp_path}:en@1")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:port")
    prefer_cache_without_hub("nobody/nothing")
    monkeypatch.setenv("HF_ENDPOINT", "http://nowhere.invalid")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    prefer_cache_without_hub("nobody/nothing")
    assert OFFLINE not in os.environ


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("allenai/c4", ("allenai/c4", None, None)),
        ("allenai/c4:en", ("allenai/c4", "en", None)),
        ("allenai/c4@refs/pr/1", ("allenai/c4", None, "refs/pr/1")),
        ("allenai/c4:en.noclean@v1.0", ("allenai/c4", "en.noclean", "v1.0")),
        ("./nowhere/c4:en", ("./nowhere/c4", "en", None)),
        ("here@home", ("here@home", None, None)),
        ("here@home:en", ("here@home", "en", None)),
        ("here@home:en@1", ("here@home", "en", "1")),
        ("a:b", ("a:b", None, None)),
    ],
)
def test_what_stands_behind_a_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, parts: tuple[str, str | None, str | None]
) -> None:
    """A folder that exists is a name as it stands, whatever is in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("here@home", "a:b"):
        (tmp_path / name).mkdir()
    assert split_subset(text) == parts
