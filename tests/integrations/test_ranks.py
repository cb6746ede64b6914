"""Scripts that hide their ranks from a framework, started by something that is not torchrun."""

import pytest

from adloco_dist.integrations.ranks import TORCHRUN, join_ranks

pytestmark = pytest.mark.stranger


@pytest.mark.parametrize("name", TORCHRUN)
@pytest.mark.parametrize("value", [None, "", "two", "-1"])
def test_what_torchrun_did_not_set_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str | None) -> None:
    for one in TORCHRUN:
        monkeypatch.setenv(one, "1")
    monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    expected = f"{name}: it is not in the environment" if value is None else f"{name}={value}: must be a number"
    with pytest.raises(ValueError, match=f"^{expected}.*; start the script with torchrun") as refused:
        join_ranks()
    assert "\n" not in str(refused.value)
