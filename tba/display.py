"""Text for display: untrusted text on a terminal, sizes in bytes, and durations."""


def printable(text: str) -> str:
    """Return untrusted text with control characters of the terminal escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def duration(seconds: float) -> str:
    """Return a duration in its largest unit, such as `4 s`, `31.5 s`, `12 min` or `2.1 d`."""
    unit, length = "s", 1
    for name, each in (("min", 60), ("h", 3600), ("d", 86400)):
        if seconds >= each:
            unit, length = name, each
    number = seconds / length
    decimals = 1 if unit == "s" or number < 10 else 0
    return f"{f'{number:.{decimals}f}'.removesuffix('.0')} {unit}"


def size(number: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"
