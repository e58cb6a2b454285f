"""`python -m paralab`."""

from paralab.cli.main import main

if __name__ == "__main__":
    main()
