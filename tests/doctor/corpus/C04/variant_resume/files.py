"""Loads saved weights."""

from torch import load


def restore(net, path):
    content = load(path, weights_only=True)  # finds C04
    net.load_state_dict(content)
