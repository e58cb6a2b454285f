"""Checkpoints on disk: a checkpoint counts only if it has a manifest that matches every byte."""

import json
import pickle
import pickletools

import pytest

from paralab.errors import UsageError
from paralab.record.checkpoints import (
    checkpoints,
    last_good,
    require_room,
    require_same_training,
    rotate,
    step_folder,
    write_manifest,
)
from paralab.record.metadata import Chunk, TensorEntry, UnsafeMetadata, read_metadata

# A DCP metadata file without tensors, assembled by hand.
METADATA = b"""\x80\x02ctorch.distributed.checkpoint.metadata
Metadata
)\x81}(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}ub."""


def make(directory, step, manifest=True):
    folder = step_folder(directory, step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
    (folder / ".metadata").write_bytes(METADATA)
    if manifest:
        write_manifest(
            folder, step=step, samples_seen=step * 8, topology={"strategy": "ddp", "world_size": 2}
        )
    return folder


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "a bit of the data": (lambda folder: flip(folder / "__0_0.distcp"), "__0_0.distcp is damaged"),
    "a bit of the metadata": (lambda folder: flip(folder / ".metadata"), ".metadata is damaged"),
    "a bit of the manifest": (lambda folder: flip(folder / "manifest.json"), "its manifest"),
    "a short file": (lambda folder: cut(folder / "__0_0.distcp"), "767 bytes"),
    "a missing file": (lambda folder: (folder / ".metadata").unlink(), ".metadata is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "half-written"),
    "half a manifest": (
        lambda folder: cut(folder / "manifest.json"),
        "its manifest cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(tmp_path, damage):
    make(tmp_path, 2)
    newest = make(tmp_path, 3)
    assert last_good(tmp_path)[0].step == 3
    harm, words = DAMAGE[damage]
    harm(newest)
    good, bad = last_good(tmp_path)
    assert bad[0].half_written == (
        damage == "no manifest"
    )  # paralab keeps anything that was once a checkpoint
    assert good.step == 2
    assert [checkpoint.step for checkpoint in bad] == [3]
    assert words in bad[0].problem


def test_any_single_flipped_bit_is_found(tmp_path):
    folder = make(tmp_path, 1)
    for name in ("__0_0.distcp", ".metadata", "manifest.json"):
        whole = (folder / name).read_bytes()
        for place in range(0, len(whole) * 8, max(1, len(whole) * 8 // 40)):
            data = bytearray(whole)
            data[place // 8] ^= 1 << place % 8
            (folder / name).write_bytes(bytes(data))
            assert checkpoints(tmp_path, check=True)[0].problem, (name, place)
        (folder / name).write_bytes(whole)
    assert checkpoints(tmp_path, check=True)[0].problem is None


def pickled(**dtypes):
    """Pickle 3 × 2 tensors with the real classes, as torch does."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries, places = {}, {}
    offsets, size = torch.Size([0, 0]), torch.Size([3, 2])
    for name, dtype in dtypes.items():
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype), size, [ChunkStorageMetadata(offsets, size)]
        )
        places[MetadataIndex(name, offsets)] = _StorageInfo("__0_0.distcp", 10 * len(places), 10)
    return pickle.dumps(Metadata(entries, storage_data=places))


def test_metadata_is_read_into_plain_data(tmp_path):
    import torch

    found = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    dtypes = {
        name: value
        for name, value in found.items()
        if not name.startswith(("torch.q", "torch.bits"))
    }  # not a parameter
    (tmp_path / ".metadata").write_bytes(pickled(**dtypes))
    index = read_metadata(tmp_path)
    assert index.tensors == {
        name: TensorEntry(name.removeprefix("torch."), (3, 2), (Chunk((0, 0), (3, 2)),))
        for name in dtypes
    }
    index.check({"__0_0.distcp": 10 * len(dtypes)})
    with pytest.raises(UnsafeMetadata):  # the last tensor would end after the end of the file
        index.check({"__0_0.distcp": 10 * len(dtypes) - 1})


def test_damaged_metadata_raise_one_kind_of_error(tmp_path):
    import torch

    whole = pickled(weight=torch.float32)
    ends = [place for _, _, place in pickletools.genops(whole)][:-1]
    for content in (
        *(whole[:end] for end in ends),
        *(whole[:end] + b"." for end in ends),
        b"",
        b"\x80\x04N.",
        b"(dp0\n.",
    ):
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(UnsafeMetadata):
            read_metadata(tmp_path)


def test_rotation_keeps_the_last_good_ones(tmp_path):
    #           whole   whole   damaged  half-written  whole
    for step, manifest in ((1, True), (2, True), (3, True), (4, False), (5, True)):
        make(tmp_path, step, manifest)
    cut(step_folder(tmp_path, 3) / "__0_0.distcp")
    assert rotate(tmp_path, keep=3) == []  # 1, 2, and 5 are intact
    assert [path.name[-1] for path in rotate(tmp_path, keep=2)] == ["1"]
    assert [path.name[-1] for path in rotate(tmp_path, keep=1)] == ["2", "3", "4"]
    assert last_good(tmp_path)[0].step == 5
    cut(step_folder(tmp_path, 5) / "__0_0.distcp")
    assert rotate(tmp_path, keep=1) == []  # none is intact, so none is deleted


def test_another_training_is_refused_with_both_values(tmp_path):
    folder = make(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"batch_size": 64}
    require_same_training(manifest, {"batch_size": 64}, folder)
    with pytest.raises(UsageError, match=r"--batch-size 64.* 32"):
        require_same_training(manifest, {"batch_size": 32}, folder)


def test_a_full_disk_is_found_before_the_save(tmp_path):
    require_room(tmp_path, 1000)
    with pytest.raises(UsageError, match="--checkpoint"):
        require_room(tmp_path, 2**60)
