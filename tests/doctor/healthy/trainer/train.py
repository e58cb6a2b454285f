"""The command line of the waveform classifier."""

import argparse
import logging

from data import make_loaders
from distributed import is_main_process, seed_all, set_up, tear_down
from network import WaveNet
from trainer import Trainer


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/waves")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main():
    options = parse()
    device = set_up()
    logging.basicConfig(level=logging.INFO if is_main_process() else logging.WARNING)
    seed_all(options.seed)
    try:
        Trainer(WaveNet(), make_loaders(options), options, device).fit()
    finally:
        tear_down()


if __name__ == "__main__":
    main()
