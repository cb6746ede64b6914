"""Members of an own loop on real hosts: one is lost as in a power cut, another's link is cut for a while."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.hosts import Host, hosts, why_unavailable
from helpers.member import on_hosts

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


@pytest.mark.parametrize("place", [0, 1])
def test_a_host_that_is_lost_without_a_word_comes_back(three: list[Host], tmp_path: Path, place: int) -> None:
    lost, rest = three[place], [host for host in three if host is not three[place]]
    with on_hosts(three, tmp_path) as members:
        lost_at = time.time()
        lost.lose()
        for host in rest:
            members.wait(host, 2, after=lost_at)
        lost.mend()
        members.start(lost)
        for host in three:
            members.wait(host, 3, after=lost_at)
        assert not members.differing(three)


@pytest.mark.parametrize("place", [0, 1])
def test_of_a_network_that_was_split_the_smaller_part_joins_the_larger(
    three: list[Host], tmp_path: Path, place: int
) -> None:
    cut, rest = three[place], [host for host in three if host is not three[place]]
    with on_hosts(three, tmp_path) as members:
        cut_at = time.time()
        cut.cut()
        for host in rest:
            members.wait(host, 2, after=cut_at)
        members.wait(cut, 1, after=cut_at)  # it goes on alone, as nobody has asked for more
        cut.mend()
        mended_at = time.time()
        joined = [members.wait(host, 3, after=mended_at) for host in three]
        assert not members.differing(three, after=mended_at)
        of_rest = max(one.number for host in rest for one in members.rounds(host) if one.members == 2)
        assert min(one.number for one in joined) <= of_rest + 2, "its own rounds, of which it had more, are left behind"
