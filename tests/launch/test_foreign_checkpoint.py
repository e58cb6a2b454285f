"""Loading an untrusted checkpoint never runs code from it. The test plants an attack in every file
of a real checkpoint and updates the checksums.

`checkpoint verify` once accepted such a checkpoint, and `run --resume` ran the command in its
.metadata."""

import hashlib
import io
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from paralab.errors import ParalabError
from paralab.experiment.run import run
from paralab.launch.processes import import_torch_once
from paralab.launch.run_options import RunOptions
from paralab.plan.request import Request
from paralab.record.checkpoints import checkpoints
from tests.conftest import run_paralab

TRAINING = Request(strategy="single", workload="mlp:tiny", steps=4, batch_size=8)
COMMAND = [
    "run",
    "single",
    "--workload",
    "mlp:tiny",
    "--steps",
    "4",
    "--batch-size",
    "8",
    "--checkpoint",
    "kept",
]
NAME = "step-00000002"


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def rewritten(folder, change):
    """Rewrite the data file with `change(name, bytes)` applied to every tensor, and update the
    metadata."""
    metadata = metadata_of(folder)
    old, new = (folder / "__0_0.distcp").read_bytes(), b""
    for index, place in metadata.storage_data.items():
        content = change(index.fqn, old[place.offset : place.offset + place.length])
        metadata.storage_data[index] = replace(place, offset=len(new), length=len(content))
        if index.fqn == "shared" or index.fqn.startswith("rank."):
            entry = metadata.state_dict_metadata[index.fqn]
            entry.size = entry.chunks[0].sizes = torch.load(
                io.BytesIO(content), weights_only=False
            ).shape
        new += content
    (folder / "__0_0.distcp").write_bytes(new)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def raw_metadata(folder, attack):
    (folder / ".metadata").write_bytes(pickle.dumps(attack))


def inside_metadata(folder, attack):
    metadata = metadata_of(folder)
    metadata.planner_data = attack
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def bytes_entry(folder, attack):
    """DCP's planner would call torch.load(weights_only=False) on an entry that is not a tensor."""
    metadata = metadata_of(folder)
    metadata.state_dict_metadata["model.0.weight"] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside_the_folder(folder, attack):
    metadata = metadata_of(folder)
    for place in metadata.storage_data.values():
        place.relative_path = f"../{NAME}/{place.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def raw_manifest(folder, attack):
    (folder / "manifest.json").write_bytes(pickle.dumps(attack))


def raw_data(folder, attack):
    """Overwrite the beginning of every tensor without moving it."""
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    for place in metadata_of(folder).storage_data.values():
        planted = pickle.dumps(attack)
        content[place.offset : place.offset + len(planted)] = planted
    (folder / "__0_0.distcp").write_bytes(bytes(content))


def zipped_data(folder, attack):
    def change(name, content):
        return content if name == "shared" or name.startswith("rank.") else saved(attack)

    rewritten(folder, change)


def pickled_in(which):
    def plant(folder, attack):
        pickled = torch.frombuffer(bytearray(saved(attack)), dtype=torch.uint8)
        rewritten(folder, lambda name, content: saved(pickled) if name == which else content)

    return plant


# The file, and whether `checkpoint verify` can detect the attack: it does not load the tensors.
ATTACKS = {
    "a pickle as .metadata": (raw_metadata, False),
    "an attack inside .metadata": (inside_metadata, False),
    "an entry that is not a tensor": (bytes_entry, False),
    "a file outside the checkpoint": (outside_the_folder, False),
    "a pickle as manifest": (raw_manifest, False),
    "a pickle in the data": (raw_data, True),
    "a torch.save file in the data": (zipped_data, True),
    "the optimizer's settings": (pickled_in("shared"), True),
    "the random streams": (pickled_in("rank.0"), True),
}


def sign(folder):
    """Update all sizes and checksums in the manifest, including its own."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.pop("sha256")
    own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"sha256": own}))


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def outcomes(room):
    """Return attack name -> the check's answer, and the exit code and output of a run that resumes.
    "none" is rewritten and signed like the others, but has no attack. One process that has
    imported torch forks all runs."""
    found = {}
    with import_torch_once():
        run(replace(TRAINING, steps=2), RunOptions(room / "run", checkpoint=room / "whole"))
        for name in ("none", *ATTACKS):
            kept = planted(room, name)
            (checked,) = checkpoints(kept, check=True)
            found[name] = (checked.problem, *resumed(kept))
    return found


def planted(room, name):
    kept = room / name
    folder = kept / NAME
    shutil.copytree(room / "whole" / NAME, folder)
    if name == "none":
        rewritten(folder, lambda name, content: content)
    else:
        plant, _ = ATTACKS[name]
        plant(folder, Attack(kept / "mark"))
    if name != "a pickle as manifest":
        sign(folder)
    return kept


def resumed(kept):
    try:
        run(TRAINING, RunOptions(kept / "run", checkpoint=kept, resume=True))
    except ParalabError as error:
        return error.exit_code, str(error)
    return 0, ""


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.processes
def test_no_file_of_a_checkpoint_can_run_code(room, outcomes, name):
    _, believed = ATTACKS[name]
    problem, code, words = outcomes[name]
    assert (problem is None) == believed
    assert code == (1 if believed else 2)  # 2: no rank has started
    assert not any(unwanted in words for unwanted in ("Traceback", "weights_only"))
    assert not (room / name / "mark").exists()


@pytest.mark.processes
def test_a_checkpoint_without_an_attack_loads(outcomes):
    assert outcomes["none"] == (None, 0, "")


@pytest.mark.processes
def test_the_commands_name_the_problem_without_a_traceback(room, outcomes, tmp_path):
    shutil.copytree(room / "whole", tmp_path / "kept")
    raw_metadata(tmp_path / "kept" / NAME, Attack(tmp_path / "mark"))
    sign(tmp_path / "kept" / NAME)
    verified = run_paralab("checkpoint", "verify", "kept", "--json", cwd=tmp_path)
    assert verified.code == 1
    assert f"{os.mkdir.__module__}.mkdir" in json.loads(verified.out)["checkpoints"][0]["problem"]
    command = run_paralab(*COMMAND, "--resume", cwd=tmp_path)
    assert command.code == 2
    assert f"{os.mkdir.__module__}.mkdir" in command.err
    assert "Traceback" not in verified.err + command.err
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("manifest", [[], "x", 3, None, {}, {"files": []}])
def test_a_manifest_that_is_not_one_is_a_problem_not_a_traceback(tmp_path, manifest):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "step-1²").mkdir()  # a digit, but not a number
    (found,) = checkpoints(tmp_path)
    assert found.problem
    assert (found.manifest, found.num_bytes, found.half_written) == ({}, 0, False)
