"""``python -m tokencredit``: the same as the command ``tokencredit``."""

from tokencredit.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
