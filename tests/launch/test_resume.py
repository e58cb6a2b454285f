"""Choose the checkpoint that a run starts from, without processes."""

import pytest
from click.testing import CliRunner

from paralab.cli.main import main
from paralab.errors import UsageError
from paralab.launch.resume import choose_checkpoint, lock_checkpoints, set_aside
from paralab.launch.run_options import RunOptions
from paralab.record.checkpoints import checkpoints, write_manifest
from tests.launch.fakes import make_plan
from tests.record.test_checkpoints import METADATA
from tests.record.test_checkpoints import make as make_checkpoint


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


def choose(kept, resume=True, **options):
    said = []
    chosen = RunOptions(checkpoint=kept, resume=resume, **options)
    return choose_checkpoint(chosen, make_plan(), said.append), said


def damage(folder):
    (folder / "__0_0.distcp").write_bytes(b"")


def test_without_a_folder_nothing_is_saved():
    assert choose(None) == (None, [])


def test_a_new_run_starts_at_step_0(kept):
    policy, said = choose(kept, resume=False, checkpoint_every=5, keep_checkpoints=2)
    assert (policy.directory, policy.every, policy.keep) == (str(kept), 5, 2)
    assert (policy.resume, policy.done, said) == (None, 0, [])


def test_the_newest_whole_checkpoint_is_used_and_a_damaged_one_is_set_aside(kept):
    for step in (2, 4, 6):
        make_checkpoint(kept, step)
    damage(kept / "step-00000006")
    policy, said = choose(kept)
    assert (policy.done, policy.samples) == (4, 32)
    assert policy.resume == str(kept / "step-00000004")
    assert len(said) == 1
    assert "step-00000006" in said[0]
    assert sorted(path.name for path in kept.iterdir()) == [
        "damaged-step-00000006-1",
        "step-00000002",
        "step-00000004",
    ]


def test_a_half_written_checkpoint_is_deleted(kept):
    make_checkpoint(kept, 2, manifest=False)
    policy, said = choose(kept)
    assert (policy.done, policy.resume) == (0, None)
    assert len(said) == 2  # unusable, and starting from the beginning
    assert list(kept.iterdir()) == []


def test_if_all_are_damaged_nothing_is_overwritten(kept):
    damage(make_checkpoint(kept, 2))
    with pytest.raises(UsageError, match="step-00000002"):
        choose(kept)
    assert [path.name for path in kept.iterdir()] == ["step-00000002"]


def test_checkpoint_verify_says_what_resume_does(kept):
    """With only damaged checkpoints, it once said that --resume starts over, but --resume stops."""

    def shown():
        return CliRunner().invoke(main, ["checkpoint", "verify", str(kept)]).stdout

    make_checkpoint(kept, 2, manifest=False)
    assert "would start" in shown()
    damage(make_checkpoint(kept, 4))
    assert "would stop" in shown()
    make_checkpoint(kept, 6)
    assert "would continue from step 6" in shown()
    assert (
        "--resume"
        not in CliRunner().invoke(main, ["checkpoint", "list", str(kept / "step-00000006")]).stdout
    )


def test_damaged_checkpoints_of_the_same_step_are_all_kept(kept):
    for number in (1, 2):
        damage(make_checkpoint(kept, 2))
        set_aside(checkpoints(kept)[0])
        assert (kept / f"damaged-step-00000002-{number}").is_dir()


def test_only_one_run_writes_to_a_folder(kept):
    with lock_checkpoints(kept), pytest.raises(UsageError, match="process "):
        with lock_checkpoints(kept):
            pass
    with lock_checkpoints(kept):  # the lock is free again
        pass
    with lock_checkpoints(None):
        pass


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"resume": True}, "--resume"),
        ({"checkpoint_every": 5}, "--checkpoint-every"),
        ({"checkpoint": "new", "checkpoint_every": 0}, "--checkpoint-every 0"),
        ({"checkpoint": "new", "keep_checkpoints": 0}, "--keep-checkpoints 0"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"step_deadline": 0.0}, "--step-deadline 0"),
        ({"save_deadline": float("nan")}, "--save-deadline nan"),
        ({"checkpoint": "file"}, "--checkpoint"),
        ({"checkpoint": "used"}, "--resume"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, flag):
    (tmp_path / "file").touch()
    make_checkpoint(tmp_path / "used", 2)
    if "checkpoint" in options:
        options = {**options, "checkpoint": tmp_path / options["checkpoint"]}
    with pytest.raises(UsageError) as error:
        RunOptions(**options).check()
    assert flag in str(error.value)


def test_cuts_come_from_the_checkpoint_of_the_same_strategy(kept):
    folder = kept / "step-00000002"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(METADATA)
    topology = {"strategy": "pipeline", "cuts": ["0", "3"]}
    write_manifest(folder, step=2, samples_seen=16, topology=topology)
    assert RunOptions(checkpoint=kept, resume=True).saved_cuts("pipeline") == ["0", "3"]
    assert RunOptions(checkpoint=kept, resume=True).saved_cuts("hybrid") == []
    assert RunOptions(checkpoint=kept).saved_cuts("pipeline") == []


def test_replicas_that_differ_are_not_given_to_another_strategy(kept):
    """local-sgd, between two averages: each replica has its own parameters."""
    folder = kept / "step-00000002"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(METADATA)
    topology = {"strategy": "local-sgd", "replicas": 2}
    write_manifest(folder, step=2, samples_seen=16, topology=topology, replicas_differ=True)
    with pytest.raises(UsageError) as error:
        choose(kept)
    assert "--replicas 2" in error.value.fix
