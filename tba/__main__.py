"""`python -m tba` is the command `tba`."""

from tba.cli import main

if __name__ == "__main__":
    main()
