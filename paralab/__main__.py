"""`python -m paralab`."""

from paralab.cli import main

if __name__ == "__main__":
    main()
