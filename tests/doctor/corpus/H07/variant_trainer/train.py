# ways: script, ranks
"""Starts the trainer."""

from lab.trainer import Trainer


def main():
    trainer = Trainer(epochs=2)
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
