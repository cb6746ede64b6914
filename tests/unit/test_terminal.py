"""What people read: no string is taken for a command, and no stream that is full or closed ends anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from adloco_dist.terminal import lasting_stream, new_console
from adloco_dist.text import first_line, one_line, printable

ODD = ["[a.txt]", "[/tmp/a.txt]", "[bold]x[/bold]", ":smile:", "[/]", "a\\[b", "100%", "{x}", "[link=x]y"]
SPEAK = """
import sys
from adloco_dist.terminal import output_was_lost, protect_streams, report_line, report_error
protect_streams()
for number in range(1000):
    report_line(f"line {number} of many, \\u2026 \\udcff")
report_error("and an error")
open("lost", "w").write(str(output_was_lost()))
"""


def speak(folder: Path, redirection: str, **environment: str) -> tuple[int, str]:
    """Exit code of a process that prints a lot, and whether it says that its output was lost."""
    command = f"{sys.executable} -c '{SPEAK}' {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env={**os.environ, **environment}, check=False)
    return done.returncode, (folder / "lost").read_text()


@pytest.mark.parametrize(
    ("redirection", "lost"),
    [
        (">/dev/full", "True"),
        (">/dev/full 2>/dev/full", "True"),
        (">&-", "False"),
        (">&- 2>&- <&-", "False"),
        ("2>&1 >out | head -1 >first", "False"),
    ],
)
def test_streams_that_are_full_or_closed(tmp_path: Path, redirection: str, lost: str) -> None:
    assert speak(tmp_path, redirection) == (0, lost)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    assert speak(tmp_path, "| head -1 >first; exit ${PIPESTATUS[0]}") == (0, "False")
    assert (tmp_path / "first").read_text().startswith("line 0 of many")


def test_a_closed_descriptor_is_no_other_file(tmp_path: Path) -> None:
    """Without care the next file to be opened takes number 1, and gets what libraries print."""
    code = "from adloco_dist.terminal import protect_streams; protect_streams(); file = open('x', 'w'); import os"
    command = f"{sys.executable} -c \"{code}; os.write(1, b'stray'); file.close()\" >&-"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "x").read_text() == ""


def test_characters_that_the_terminal_lacks(tmp_path: Path) -> None:
    assert speak(tmp_path, ">out", PYTHONIOENCODING="ascii", LC_ALL="C") == (0, "False")
    assert (tmp_path / "out").read_text().splitlines()[7] == "line 7 of many, ? \\udcff"


@pytest.mark.parametrize("text", ODD)
def test_strings_are_shown_as_they_are(tmp_path: Path, text: str) -> None:
    with (tmp_path / "out").open("w") as file:
        console = new_console(file=file)
        table = Table(title=text)
        table.add_column(text)
        table.add_row(text)
        console.print(table)
        console.print(text)
    assert (tmp_path / "out").read_text().count(text) == 4


def test_what_a_terminal_would_obey() -> None:
    assert printable("\x1b[31mred\x07\r\nnext\tcolumn \x9b") == "\\x1b[31mred\\x07\\r\nnext\tcolumn \\x9b"
    assert one_line(" a\nb\tc \x1b[2J") == "a b c \\x1b[2J"
    assert len(one_line("x" * 10_000)) == 2000
    assert one_line("äöü … 漢字") == "äöü … 漢字"


def test_what_an_exception_says_first() -> None:
    assert first_line(RuntimeError("\n  \nwhat it is\nframe 0: 0x1234")) == "what it is"
    assert first_line(KeyError()) == "KeyError"


def test_a_stream_on_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    stream = lasting_stream(os.open("/dev/full", os.O_WRONLY))
    stream.write("lost\n")
    stream.flush()
    kept = os.open(tmp_path / "out", os.O_WRONLY | os.O_CREAT)
    os.dup2(kept, stream.fileno())
    stream.write("kept\n")
    stream.flush()
    assert (tmp_path / "out").read_text() == "kept\n"
