"""The library for pages is put together once on a machine."""

from pathlib import Path

import pytest

from adloco_dist.report.vega import vega_script


def test_the_script_is_kept_where_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = vega_script.__wrapped__()
    assert "window.vegaEmbed" in script
    assert "</script" not in script
    (kept,) = (tmp_path / "adloco_dist").iterdir()
    assert kept.read_text() == script
    kept.write_text("what is there")
    assert vega_script.__wrapped__() == "what is there"
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert vega_script.__wrapped__() == script
