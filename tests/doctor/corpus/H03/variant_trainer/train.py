# ways: script, ranks
"""The entry point of a small training program in two modules."""

import argparse

from engine import Engine

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    Engine(parser.parse_args()).run()
