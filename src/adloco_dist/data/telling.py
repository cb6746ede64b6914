"""What a reader's exception becomes: the words of one line. Every "(why)" in a message about data is made here."""

MOST_CHARACTERS = 300


def reason(error: BaseException) -> str:
    """Why something could not be read, in one short line."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return one_line(said) or type(error).__name__


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` without line breaks and what a terminal cannot show, cut off after `most` characters."""
    printable = "".join(character if character.isprintable() else " " for character in text[: 2 * most])
    return " ".join(printable.split())[:most]
