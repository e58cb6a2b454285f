"""Logs of broken jobs, mostly from real runs. The doctor reports each failure with its id, culprit,
and line, and never blames a victim."""

import linecache
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.logs.reading import read_logs
from paralab.doctor.source_context import _around, _tree

LOGS = Path(__file__).parent / "logs"

# log -> the finding, as (id, rank, line of train.py). The rank is None if all ranks printed it, or
# if the log does not show which one did.
EXPECTED = {
    "A02_twice": [("A02", None, 16)],
    "A03_no_update": [("A03", None, 16)],
    "A04_plain_step": [("A04", None, 17)],
    "A05_half": [("A05", None, 16)],
    "A06_bf16": [("A06", 0, 63)],
    "A07_skipped": [("A07", None, 19)],
    "A10_no_cuda": [("A10", None, 11)],
    "A11_unscaled": [("A11", None, 16)],
    "C01_prefix": [("C01", None, 11)],
    "C03_torn": [("C03", 1, 33)],
    "D01_mean": [("D01", None, None)],
    "D01_scalars": [("D01", None, 41)],
    "D03_replica": [("D03", None, 41)],
    "D05_attribute": [("D05", None, 10)],
    "D07_unequal": [("D07", None, None)],
    "H01_final_barrier": [("H01", 1, 7)],
    "H01_uneven": [("H01", 1, 13), ("H16", 1, None)],
    "H02_early_exit": [("H01", 0, 14), ("H02", 0, None), ("H16", 0, None)],
    "H02_early_return_unknown_world": [("H02", None, None)],
    "H02_srun": [("H01", 0, 14), ("H02", 0, None)],
    "H03_detail": [("H03", None, 9)],
    "H03_late": [("H03", None, 6)],
    "H03_rank0_barrier": [("H03", None, 12)],
    "H04_detail": [("H04", None, 6)],
    "H04_nccl_mismatch": [("H04", None, None)],
    "H04_order": [("H04", None, 13)],
    "H06_detail": [("H06", None, 9)],
    "H06_nccl_sizes": [("H06", None, None)],
    "H06_ragged_gather": [("H06", None, None)],
    "H07_nccl_broadcast": [("H07", 0, None)],
    "H07_nccl_two_ranks": [("H07", None, None)],
    "H07_rank0_validation": [("H07", None, 15)],
    "H09_guess": [("H09", None, None)],
    "H09_newer": [("H09", 0, None)],
    "H10_behind": [("H10", 1, None)],
    "H10_missing": [("H10", 1, None)],
    "H11_bad_sample": [("H11", 1, 15)],
    "H11_cuda_oom": [("H11", 2, 57), ("H16", 2, None)],
    "H11_data_worker": [("H11", 1, 10)],
    "H11_device_assert": [("H11", 1, 59)],
    "H11_ecc_xid": [("H11", 1, None)],
    "H11_exit_code": [("H11", 1, None)],
    "H11_illegal_access": [("H11", 0, 44)],
    "H11_raised_from": [("H11", 0, 4)],
    "H11_record": [("H11", 1, 7)],
    "H11_restarted": [("H11", 1, 15)],
    "H11_sigsegv": [("H11", 1, 8)],
    "H11_sigsegv_silent": [("H11", None, None), ("H19", None, None)],
    "H11_spawn": [("H11", 1, 5)],
    "H11_srun": [("H11", 1, 15)],
    "H11_tee": [("H11", 1, 15)],
    "H11_unhandled_cuda": [("H11", 1, 61)],
    "H11_words_elsewhere": [("H11", None, None)],
    "H12_killed": [("H12", 1, None)],
    "H12_sigterm": [("H12", None, None)],
    "H12_slurm_node": [("H12", None, None)],
    "H12_slurm_oom": [("H12", 2, None)],
    "H12_slurm_time": [("H12", None, None)],
    "H10_barrier": [("H10", 0, None)],
    "H13_store": [("H13", None, 31)],
    "H14_branch": [("H14", 1, 19), ("H16", 1, None)],
    "H15_ahead": [
        ("H15", None, None)
    ],  # rank 1 is behind the others, but has now reached the place where they wait
    "H15_all_equal": [("H15", None, None)],
    "H16_slow_end": [("H01", 1, 45), ("H16", 1, None)],
    "H17_not_destroyed": [("H17", 0, None)],
    "H18_client": [("H18", None, 2)],
    "H18_gloo": [("H18", None, 17)],
    "H18_name": [("H18", None, None)],
    "H18_server": [("H18", None, 2)],
    "H18_spawn": [("H18", None, 17)],
    "H19_detail": [("H19", None, 9)],
    "H19_silent": [("H11", None, None), ("H19", None, None)],
    "L01_rank": [("L01", None, 2)],
    "L01_torchrun": [("L01", None, None)],
    "L01_two_servers": [("L01", 0, 18)],
    "L02_python": [("L02", None, 2)],
    "L03_duplicate_gpu": [("L03", None, 23)],
    "L05_nccl": [("L05", None, 5)],
    "L06_before_init": [("L06", None, 5)],
    "L07_count": [("L07", None, 9)],
    "L07_shape": [("L07", 1, 9)],
    "L08_device_ids": [("L08", None, 9)],
    "L09_omp": [("L09", None, None)],
    "L09_workers": [("L09", None, None)],
    "L10_sigill": [("L10", 1, 8)],
    "L11_no_room": [("L11", None, 23)],
    "L11_shm": [("H16", 0, None), ("L11", 0, 52)],
    "L11_sigbus": [("L11", 1, 8)],
    "P01_uneven_chunks": [("P01", 1, 18)],
    "P02_small_batch": [("P02", None, 16)],
    "P03_one_chunk": [("P03", None, 12)],
    "P04_broadcast": [("P04", 0, 16)],
    "S01_unused": [("S01", None, 19)],
    "S02_checkpoint": [("S02", None, 20)],
    "S03_static_graph": [("S03", None, 19)],
    "S04_find_unused": [("S04", None, None)],
    "S05_inplace": [("S05", None, 61)],
    "S09_one_row": [("S09", None, 12)],
    "S13_attached_loss": [("S13", None, None)],
    "S17_one_by_one": [("L09", None, None), ("S17", None, None)],
    "S17_strides": [("S17", None, None)],
    "T03_shuffle": [("T03", None, 10)],
    "T04_stream": [("T04", None, 17)],
    "healthy_interrupted": [],
    "healthy_restarted": [],
    "healthy_run": [],
    "healthy_words": [],
}


def diagnosed(*paths):
    return apply("log", read_logs(paths))


def ids_in(*paths):
    return sorted(((f.id, f.rank, f.line) for f in diagnosed(*paths)), key=str)


def test_every_log_has_an_expectation():
    assert sorted(EXPECTED) == sorted(path.stem for path in LOGS.glob("*.log"))


@pytest.mark.parametrize("name", EXPECTED)
def test_log(name):
    found = diagnosed(LOGS / f"{name}.log")
    assert sorted(((f.id, f.rank, f.line) for f in found), key=str) == sorted(
        EXPECTED[name], key=str
    )
    text = (LOGS / f"{name}.log").read_text().splitlines()
    for finding in found:
        assert finding.evidence
        for (
            evidence
        ) in finding.evidence:  # "…/H01_uneven.log:19: RuntimeError: …" is that line of the file
            place, _, words = evidence.partition(": ")
            assert words.removesuffix(" …") in text[int(place.rpartition(":")[2]) - 1]
        assert finding.file is None or finding.file.endswith("train.py")


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("H")])
def test_a_torn_log_accuses_nobody_else(name, tmp_path):
    """With only the beginning or the end of a log, the doctor may find less. It must not blame a
    rank for certain if the whole log shows that the rank is innocent."""
    lines = (LOGS / f"{name}.log").read_bytes().splitlines(keepends=True)
    guilty = {rank for _, rank, _ in EXPECTED[name]} | (
        {0, 1} if name in ("H11_sigsegv_silent", "H19_silent") else set()
    )
    torn = tmp_path / "job.log"
    for cut in range(3, len(lines), max(1, len(lines) // 4)):
        for part in (lines[:cut], lines[cut:]):
            torn.write_bytes(b"".join(part))
            assert {f.rank for f in diagnosed(torn) if f.severity == "error"} <= guilty | {None}


def test_one_rank_s_words_alone_accuse_nobody(tmp_path):
    """Rank 3's log says that a rank is gone. Only the other logs show which one."""
    words = (LOGS / "H02_early_exit.log").read_text().replace("rank1]", "rank3]").splitlines()
    log = tmp_path / "job.log"
    log.write_text("\n".join(line for line in words if line.startswith("[rank3]")))
    assert ids_in(log) == [("H02", None, None)]


def test_paralab_s_own_logs():
    runs = LOGS.parent.parent / "runs"
    assert ids_in(runs / "raised" / "logs") == [("H11", 1, 60)]
    assert ids_in(runs / "killed" / "logs") == [
        ("H02", None, None)
    ]  # a killed rank prints nothing; the run folder shows more


def test_the_catalogue_s_own_words_for_a_timeout(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
        "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
        "last enqueued NCCL work: 811, last completed NCCL work: 807.\n"
    )
    (found,) = diagnosed(log)
    assert (found.id, found.severity, found.rank) == ("H10", "suspect", None)
    assert "collective 808, all_reduce of 9,801,523" in found.why
    assert len(found.evidence) == 2


# The files from torchrun --log-dir: the launcher's own output, and a file per rank and stream.
FOLDERS = {
    "folder_H01": [("H01", 1, 13), ("H16", 1, None)],
    "folder_H02": [("H02", None, None)],
    "folder_H11": [("H11", 1, 15)],
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_of_torchrun(name):
    assert ids_in(LOGS / name) == sorted(FOLDERS[name], key=str)
    files = sorted((LOGS / name).rglob("*.*"), reverse=True)
    assert ids_in(*files) == sorted(FOLDERS[name], key=str)  # in any order


ALONE = """
import torch.distributed as dist

def save(model):
    {condition}
        dist.barrier()
"""
WAITED = """[rank0]: Traceback (most recent call last):
[rank0]:   File "{file}", line 6, in save
[rank0]:     dist.barrier()
[rank0]:   File "/opt/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356, in barrier
[rank0]:     work.wait()
[rank0]: RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/{what}
rank 1 saved
"""
LOST = "pair.cc:553] Connection closed by peer [127.0.0.1]:7555."
LATE = "unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("condition", "what", "expected"),
    [
        (
            "if dist.get_rank() == 0:",
            LOST,
            [("H03", 0, 6)],
        ),  # only this rank waits, and the others are right
        ("if dist.get_rank() == 0:", LATE, [("H03", 0, 6)]),
        ("if first_batch:", LOST, [("H02", 1, None)]),
        ("if model:", LOST, [("H02", 1, None)]),  # all ranks should be here, and one is gone
        ("if model:", LATE, [("H03", 1, 6)]),
    ],
)
def test_the_file_tells_who_of_two_is_to_blame(tmp_path, condition, what, expected):
    script = tmp_path / "train.py"
    script.write_text(ALONE.format(condition=condition))
    log = tmp_path / "job.log"
    log.write_text(WAITED.format(file=script, what=what))
    assert ids_in(log) == expected
    script.unlink()  # without the file, no rank is blamed; the doctor caches files that it has read
    for cache in (_tree, _around):
        cache.cache_clear()
    linecache.clearcache()
    assert [rank for _, rank, _ in ids_in(log)] == [None]
    for cache in (_tree, _around):
        cache.cache_clear()
