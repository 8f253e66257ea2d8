"""Text for people: untrusted text on a terminal, sizes in bytes, and durations."""


def printable(text: str) -> str:
    """Return untrusted text with control characters of the terminal escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def size(number: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
