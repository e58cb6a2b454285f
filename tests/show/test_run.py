"""The result of a run in the terminal."""

import pytest

from paralab.show.run import together


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["cpu:0"], "cpu:0"),
        (["cuda:0", "cuda:0"], "cuda:0"),  # two ranks share a GPU
        (["cpu:0", "cpu:2"], "cpu:0,2"),
        ([f"cpu:{n}" for n in range(8)], "cpu:0–7"),
        (["cpu:0", "cpu:1", "cpu:4", "cpu:5"], "cpu:0,1,4,5"),
    ],
)
def test_devices_that_use_the_same_memory_share_a_line(devices, words):
    """Eight replicas once had the same line eight times."""
    assert together(devices) == words
