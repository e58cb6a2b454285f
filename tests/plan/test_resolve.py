"""A request, a machine, and a summary lead to a plan, or to an error that says what to write
instead."""

import re
from dataclasses import replace

import pytest

from paralab.errors import UsageError
from paralab.machine.host import Gpu, Machine
from paralab.machine.precision import Probe
from paralab.plan import backend
from paralab.plan.grid import Place
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.workload.summary import Layer, Summary, Unit

CPU = Machine(
    4,
    2**34,
    "a CPU",
    "linux",
    "3.11",
    "2.13",
    None,
    (),
    ("gloo",),
    "this torch is built without CUDA",
)
GPU = Gpu("NVIDIA H200", 2**37, (9, 0))
OLD = Gpu("Tesla V100", 2**34, (7, 0))


def machine(*gpus):
    return Machine(
        16, 2**37, "a CPU", "linux", "3.11", "2.13", "13.0", gpus, ("gloo", "nccl"), None
    )


def summary(**changes):
    layers = tuple(
        Layer(str(n), (str(n),), seconds, 100)
        for n, seconds in enumerate([3.0, 1.0, 1.0, 1.0, 2.0])
    )
    given = {
        "batch_norms": 0,
        "dropout": False,
        "random": False,
        "layers": layers,
        "samples": 1000,
        "batch_size": 64,
    }
    facts = {
        "name": "net",
        "parameters": 500,
        "parameter_bytes": 2000,
        "data_path": "here",
        "weighted": False,
        "optimizer": "SGD",
    }
    return Summary(**facts | given | changes)


def plan(strategy, on=CPU, of=None, probe=lambda name: Probe(True, "tried"), cuts=(), **options):
    return resolve(Request(strategy, **options), on, of or summary(), probe, cuts=cuts)


@pytest.mark.parametrize(
    ("strategy", "options", "sentence"),
    [
        ("single", {}, "64 = 64 samples"),
        ("single", {"accumulate": 4}, "64 = 4 accumulation steps × 16 samples"),
        (
            "ddp",
            {"replicas": 2, "accumulate": 4},
            "64 = 2 ranks × 4 accumulation steps × 8 samples",
        ),
        ("ddp", {"replicas": 3}, "64 = 22 + 22 + 20 samples on 3 ranks"),
        ("dp", {"replicas": 2}, "64 = 2 replicas × 32 samples"),
        ("dp", {"replicas": 5}, "64 = 13 + 13 + 13 + 13 + 12 samples on 5 replicas"),
        ("mp", {}, "64 = 64 samples"),
        ("pipeline", {"micro_batches": 3}, "64 = 22 + 21 + 21 samples in 3 micro-batches"),
        ("hybrid", {"micro_batches": 4}, "64 = 2 ranks × 4 micro-batches × 8 samples"),
        (
            "hybrid",
            {"replicas": 3, "micro_batches": 2},
            "64 = 22 + 22 + 20 samples on 3 ranks, each in 2 micro-batches",
        ),
    ],
)
def test_the_arithmetic_is_a_sentence(strategy, options, sentence):
    assert plan(strategy, **options).arithmetic == sentence


@pytest.mark.parametrize(
    ("strategy", "options", "parts", "fix"),
    [
        ("ddp", {"replicas": 100}, ["64", "100"], "--batch-size 100 or more"),
        ("mp", {"stages": 6}, ["--stages 6", "5 parts"], "--stages 5 or fewer"),
        ("pipeline", {"micro_batches": 65}, ["64", "65"], "--micro-batches 64 or fewer"),
        ("ddp", {"accumulate": 33}, ["32 samples", "33"], "--accumulate 32 or fewer"),
        (
            "dp",
            {"accumulate": 33},
            ["64 samples", "33 accumulation steps × 2 replicas"],
            "--accumulate 32 or fewer",
        ),
        ("single", {"replicas": 2}, ["--replicas 2", "single"], "dp, ddp, fsdp, hybrid"),
        ("ddp", {"stages": 2}, ["--stages 2", "ddp"], "mp, pipeline, hybrid"),
        ("ddp", {"precision": "tf32"}, ["--precision tf32", "CPU"], "fp32"),
        ("ddp", {"device": "cuda"}, [CPU.no_gpu_reason], "--device cpu"),
        ("ddp", {"precision": "fp61"}, ["--precision", "'fp61'", "'fp64'"], "bf16"),
        ("dpp", {}, ["'dpp'", "'dp'"], "pipeline"),
        ("single", {"steps": 0}, ["--steps 0"], "--steps 1 or more"),
        ("single", {"seed": -1}, ["--seed -1"], "--seed 0"),
        ("single", {"samples": 1001}, ["--samples 1001", "1000"], "--samples 1000"),
        ("single", {"loss_scale": 8.0}, ["--loss-scale 8", "fp16"], "--precision fp16"),
        ("single", {"no_scaler": True}, ["--no-scaler", "fp16"], "--precision fp16"),
        ("ddp", {"sync_every_pass": True}, ["--sync-every-pass"], "--accumulate 4"),
        ("ddp", {"static_graph": True, "accumulate": 2}, ["--accumulate 2"], "leave out"),
        (
            "pipeline",
            {"recompute": "selective", "schedule": "zero-bubble"},
            ["zero-bubble", "selective"],
            "--recompute full",
        ),
        ("dp", {"compile": True}, ["--compile", "dp"], "single, ddp, fsdp"),
        (
            "single",
            {"compile": True, "recompute": "selective"},
            ["--compile", "selective"],
            "--recompute full",
        ),
        ("fsdp", {"zero": 4}, ["--zero", "'4'"], "one of: 1, 2, 3"),
        ("ddp", {"zero": 1}, ["--zero 1", "ddp"], "fsdp"),
        ("fsdp", {"zero": 1, "shard_groups": 2}, ["--zero 1", "--shard-groups 2"], "--zero 2"),
        ("fsdp", {"shard_groups": 2}, ["2", "2 replicas"], "--replicas 4"),
        ("fsdp", {"shard_groups": 3, "replicas": 4}, ["3", "4 replicas"], "--replicas 6"),
        ("ddp", {"prefix": "nice {node}"}, ["node"], "{local_rank}"),
        ("ddp", {"prefix": "no-such-command"}, ["'no-such-command'"], "command"),
    ],
)
def test_a_wrong_request_is_refused_with_its_numbers_and_the_fix(strategy, options, parts, fix):
    with pytest.raises(UsageError) as refused:
        plan(strategy, **options)
    assert [part for part in parts if part not in refused.value.problem] == []
    assert fix in (refused.value.fix or "")
    assert refused.value.exit_code == 2


def test_endless_data_has_no_epochs():
    with pytest.raises(UsageError, match="--epochs 2"):
        plan("single", of=summary(samples=None), epochs=2)
    assert plan("single", of=summary(samples=None), epochs=2, samples=100).num_steps == 4


def test_stages_are_cut_by_time():
    assert [part.modules for part in plan("mp").stage_parts] == [("0", "1"), ("2", "3", "4")]


def test_a_model_that_cannot_be_cut_is_refused_with_the_reason():
    whole = summary(layers=(Layer("", ("",), 1.0, 100),), uncut_reason="a parameter is tied")
    with pytest.raises(UsageError, match="because a parameter is tied"):
        plan("pipeline", of=whole)


def test_a_cpu_device_is_a_fixed_share_of_the_cores():
    assert plan("single").threads_per_device == 4
    assert plan("ddp", replicas=2).threads_per_device == 2
    assert plan("hybrid").threads_per_device == 1
    assert plan("single", threads_per_device=1).threads_per_device == 1
    # Once, a run on GPUs ignored the option.
    assert plan("single", on=machine(GPU), threads_per_device=3).threads_per_device == 3
    assert plan("ddp", on=machine(GPU, GPU)).threads_per_device == 8
    crowded = plan("ddp", replicas=8)
    assert crowded.threads_per_device == 1
    assert any(
        "share cores: 8 devices × 1 thread > 4 cores" in remark for remark in crowded.remarks
    )


def test_backends():
    assert plan("single").backend is None
    assert plan("ddp").backend == "gloo"
    assert plan("ddp", on=machine(GPU)).backend == "gloo"  # NCCL refuses two ranks on one GPU
    assert plan("ddp", on=machine(GPU, GPU)).backend == "cpu:gloo,cuda:nccl"

    here = replace(CPU, backends=("gloo", "local"))
    assert plan("ddp", on=here).backend == "local"
    assert plan("ddp", on=here).staging_bytes == 3 * 2 * 2**20 + 2 * 2**16
    assert plan("ddp", on=CPU).staging_bytes == 0
    assert plan("ddp", on=here, backend="gloo").backend == "gloo"
    assert joined("ddp", launched("", ""), on=here).backend == "local"
    assert joined("ddp", launched("", "", "", ""), on=here).backend == "gloo"  # two nodes


@pytest.mark.parametrize(
    ("strategy", "on", "backend", "reason", "instead"),
    [
        ("ddp", CPU, "nccl", "CPU processes", "--backend gloo"),
        ("ddp", CPU, "local", "Linux", "--backend gloo"),
        ("ddp", machine(GPU), "nccl", "share a GPU", "--backend gloo"),
        ("fsdp", machine(GPU), "gloo", "crash on CUDA tensors", "--device cpu"),
        ("pipeline", CPU, "gloo", "one process", "--schedule"),
    ],
)
def test_a_backend_that_cannot_work_is_refused(strategy, on, backend, reason, instead):
    with pytest.raises(UsageError) as refused:
        plan(strategy, on=on, backend=backend)
    assert reason in refused.value.problem
    assert instead in refused.value.fix


def test_every_gpu_must_support_the_precision():
    assert plan("single", on=machine(GPU), precision="bf16").precision == "bf16"
    with pytest.raises(UsageError, match=r"Tesla V100 has 7\.0"):
        plan("single", on=machine(OLD), precision="bf16")


def test_low_precision_on_a_cpu_is_tried_first():
    narrow = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    assert (
        plan("single", precision="bf16", probe=lambda name: Probe(True, "ok", narrow)).environment
        == narrow
    )
    with pytest.raises(UsageError, match="was killed by SIGILL"):
        plan(
            "single",
            precision="bf16",
            probe=lambda name: Probe(False, "a trial process was killed by SIGILL"),
        )


def test_the_plan_announces_legitimate_differences():
    norms = summary(batch_norms=2, dropout=True)
    assert plan("single", of=norms).differences == ()
    assert plan("mp", of=norms).differences == ()  # the whole batch passes through together
    [batch_norm, dropout] = plan("ddp", of=norms).differences
    assert "BatchNorm (2 layers)" in batch_norm
    assert "dropout" in dropout
    assert "AdamW" in plan("ddp", of=summary(optimizer="AdamW")).differences[0]


def test_the_plan_names_the_shard_units_and_refuses_what_cannot_be_sharded():
    units = (Unit("embedding", 600), Unit("block", 1000))
    found = plan("fsdp", of=summary(units=units))
    assert found.shard_units == ("embedding", "block")
    [reason] = [reason for reason in found.reasons if reason.choice == "shard units"]
    assert reason.value == "2: embedding, block"
    assert re.findall(r"[\d.]+ K?i?B", reason.because) == ["1.6 KiB", "2.0 KiB", "400 B"]
    assert [r.value for r in plan("fsdp").reasons if r.choice == "shard units"] == [
        "the whole model"
    ]
    with pytest.raises(UsageError, match="'scale'") as refused:
        plan("fsdp", of=summary(scalars=("scale",)))
    assert "shape (1,)" in refused.value.fix
    with pytest.raises(UsageError, match=r"2\.10.*2\.9\.1\+cpu"):
        plan("fsdp", on=replace(CPU, torch="2.9.1+cpu"))


def test_every_choice_has_a_reason_and_the_plan_survives_json():
    import json

    made = plan("hybrid", precision="bf16")
    assert all(reason.because for reason in made.reasons)
    assert {"device", "replicas", "stages", "micro-batches", "backend", "bucket"} <= {
        r.choice for r in made.reasons
    }
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made


def launched(*gpus, cores=8.0):
    """Return the places of launched ranks, two per node, that each see these GPUs."""
    return [
        Place(f"n{rank // 2 + 1}", rank % 2, tuple(seen), cores) for rank, seen in enumerate(gpus)
    ]


def joined(strategy, places, on=CPU, **options):
    return resolve(
        Request(strategy, **options), on, summary(), lambda name: Probe(True, "tried"), None, places
    )


def test_launched_ranks_are_the_replicas_where_they_are():
    found = joined("ddp", launched("", "", "", "", cores=8.0))
    assert found.replicas == 4
    assert [(rank.node, rank.local_rank) for rank in found.ranks] == [
        ("n1", 0),
        ("n1", 1),
        ("n2", 0),
        ("n2", 1),
    ]
    assert found.threads_per_device == 8
    assert joined("hybrid", launched("", "", cores=8.0)).threads_per_device == 4  # two stages each
    assert joined("ddp", launched("", "", cores=0.5)).threads_per_device == 1


def test_launched_ranks_use_nccl_if_each_has_a_gpu():
    assert "nccl" in joined("ddp", launched("AB", "AB", "CD", "CD"), on=machine(GPU, GPU)).backend
    assert (
        "nccl" in joined("ddp", launched("A", "B", "C", "D"), on=machine(GPU)).backend
    )  # srun --gpus-per-task=1
    assert joined("ddp", launched("A", "A"), on=machine(GPU)).backend == "gloo"


@pytest.mark.parametrize(
    ("strategy", "options", "problem"),
    [
        ("ddp", {"replicas": 3}, "ddp --replicas 3 .* 3 ranks, .* 2 "),
        ("dp", {"replicas": 2}, "dp --replicas 2 .* 1 rank, .* 2 "),
        ("single", {}, "single .* 1 rank, .* 2 "),
    ],
)
def test_a_wrong_number_of_launched_ranks_is_refused(strategy, options, problem):
    with pytest.raises(UsageError, match=problem):
        joined(strategy, launched("", ""), **options)


def test_a_launched_rank_without_a_gpu_is_refused():
    with pytest.raises(UsageError, match="n1"):
        joined("ddp", launched("A", ""), on=machine(GPU))


def test_ranks_that_share_a_gpu_use_local_and_one_bucket_unless_mps_runs():
    on = replace(machine(GPU), backends=("gloo", "nccl", "local"), nccl=(2, 29, 7))
    turns = plan("ddp", on=on)
    assert (turns.backend, turns.mps) == ("local", False)
    whole = turns.bucket_mb
    assert whole is not None
    assert whole * 2**20 > summary().parameter_bytes
    assert plan("ddp", on=on, bucket_mb=3.0).bucket_mb == 3
    together = plan("ddp", on=on, mps=True, probe=lambda what: Probe(True, "it works"))
    assert (together.mps, together.bucket_mb) == (True, None)
    without = plan("ddp", on=on, mps=True, probe=lambda what: Probe(False, "not installed"))
    assert (without.mps, without.bucket_mb) == (False, whole)
    assert plan("fsdp", on=on).backend == "local"
    assert plan("fsdp", on=on).staging_bytes == 3 * 32 * 2**20
    assert plan("ddp", on=machine(GPU, GPU)).bucket_mb is None


def test_nccl_shares_a_gpu_from_2_30_on_if_asked_and_if_it_works():
    new = replace(machine(GPU), backends=("gloo", "nccl", "local"), nccl=(2, 30, 1))
    works = plan("ddp", on=new, backend="nccl", probe=lambda what: Probe(True, "it works"))
    assert works.environment == {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert plan("ddp", on=new).backend == "local"
    for on, probe in (
        (new, Probe(False, "no answer within 60 s")),
        (replace(new, nccl=(2, 29, 7)), Probe(True, "")),
    ):
        with pytest.raises(UsageError) as refused:
            plan("ddp", on=on, backend="nccl", probe=lambda what, probe=probe: probe)
        assert "--backend local" in refused.value.fix


def test_mps_on_a_cpu_is_off():
    found = plan("ddp", on=CPU, mps=True)
    assert not found.mps
    assert any("--mps" in remark for remark in found.remarks)


@pytest.mark.parametrize(("samples", "batch", "number"), [(100, 101, 1), (100, 100, 0)])
def test_a_batch_larger_than_an_epoch_is_remarked(samples, batch, number):
    """The plan once printed 99,999,999,999 samples per step for data with 4096 samples, without a
    remark."""
    remarks = plan("ddp", of=summary(samples=samples), batch_size=batch).remarks
    assert len([each for each in remarks if "100 samples" in each]) == number


def test_the_slots_of_local_have_the_size_that_the_plan_says():
    from paralab.collectives import gpu_staging, shared_memory, staging

    assert staging.Staging.slot_bytes == backend.CPU_SLOT
    assert (backend.NOTES, backend.NOTE_BYTES) == (shared_memory.NOTES, shared_memory.NOTE_BYTES)
    assert (backend.SLOTS, backend.SMALLEST_SLOT) == (staging.SLOTS, gpu_staging.SLOT_BYTES)
    assert backend.PART_OF_MEMORY == gpu_staging.PART_OF_MEMORY
    mib, gib = 2**20, 2**30
    assert backend.slot_bytes(24 * mib, 24 * gib) == 32 * mib
    assert backend.slot_bytes(340 * mib, 139 * gib) == 512 * mib
    assert backend.slot_bytes(3 * gib, 24 * gib) == 128 * mib
