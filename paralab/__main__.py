"""`paralab` and `python -m paralab`."""

import sys


def main() -> None:
    """Import the command line, which takes a moment, and run it."""
    try:
        from paralab.cli.main import main as run
    except KeyboardInterrupt:  # it handles Ctrl-C itself once it is imported
        print("paralab: Stopped by Ctrl-C; nothing has started.", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
