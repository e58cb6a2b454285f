"""The largest batch that fits, and an estimate compared with a measurement."""

from dataclasses import replace

import pytest

from paralab.experiment import memory
from paralab.experiment.memory import estimate_all, search, with_fit, with_memory
from paralab.launch.inspect import Inspected
from paralab.plan.memory_trial import DeviceEstimate, Fit, MemoryEstimate, MemoryTrial, Pass, Weight
from paralab.plan.plan import Plan
from paralab.plan.request import Request
from paralab.plan.resolve import resolve
from paralab.show.memory import _sentence
from paralab.units import parse_size
from paralab.workload.sequence_plan import SequencePlan
from tests.launch.fakes import MACHINE, SUMMARY, make_plan

INSPECTED = Inspected(MACHINE, SUMMARY)
P = 1000  # bytes of parameters


@pytest.mark.parametrize("most_that_fits", [0, 1, 15, 16, 17, 31, 32, 45, 1000])
@pytest.mark.parametrize("start", [1, 16, 64])
def test_search(most_that_fits, start):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= most_that_fits

    assert search(fits, start, most=10_000) == most_that_fits
    assert len(asked) <= 24


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 1000**3),
        ("16 GiB", 16 * 1024**3),
        ("0.5tb", 500 * 1000**3),
        ("7B", 7),
        ("16", None),
        ("16XB", None),
        ("1.2.3GB", None),
        ("0GB", None),
        (".GB", None),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


def test_search_without_an_end():
    assert search(lambda number: True, 16, most=10_000) is None


def trials(monkeypatch, activations):
    """Replace the trials: n samples need this many bytes in addition to the parameters. Return the
    list of sizes that paralab tried."""
    tried = []

    def try_memory(asked):
        [(_, sizes)] = asked
        tried.append(list(sizes))
        weight = Weight("w", 10, 250, P, True, 0, 0, 0)
        passes = (Pass(n, 0, (activations(n),), 0, 0, activations(n), 0) for n in sizes)
        return [MemoryTrial((weight,), {}, (), tuple(passes), 0)]

    monkeypatch.setattr(memory, "try_memory", try_memory)
    return tried


def find_fit(limit, strategy="ddp", **options):
    request = Request(strategy, **{"replicas": 2, "steps": 1} | options)
    return with_fit(request, INSPECTED, make_plan(strategy, **options), limit).memory.fit


def test_the_largest_batch(monkeypatch):
    """With n samples per rank, 1000 + 10 n bytes are needed, so 2000 bytes have room for 100 on
    each of 2 ranks."""
    tried = trials(monkeypatch, lambda n: 10 * n)
    fit = find_fit(2000)
    assert (fit.needed, fit.fits) == (1000 + 10 * 32, True)
    assert (fit.largest_batch_size, fit.largest_batch_bytes) == (200, 2000)
    assert tried == [[32, 64], [100, 101]]  # trials of the answer and of one more confirm it

    fit = find_fit(1100)
    assert (fit.fits, fit.largest_batch_size) == (False, 20)
    fit = find_fit(900)
    assert (fit.fits, fit.largest_batch_size, fit.no_largest) == (False, None, "no batch size fits")


def test_the_answers_trial_must_fit(monkeypatch):
    """From 90 samples on, a different algorithm needs 300 bytes more. The line through the first
    passes predicts 100 samples, but a trial with 100 does not fit."""
    trials(monkeypatch, lambda n: 10 * n + 300 * (n >= 90))
    fit = find_fit(2000)
    assert (fit.largest_batch_size, fit.largest_batch_bytes) == (2 * 89, 1000 + 10 * 89)


def test_one_more_sample_must_not_fit(monkeypatch):
    """From 43 samples on, another part of the step needs the most. The line between 32 and 64
    predicts 37 samples. They fit, but 46 do, too: `plan --recompute full` once called 22 samples the
    largest batch, and 23 fit."""
    trials(monkeypatch, lambda n: max(300, 30 * n - 1000))
    fit = find_fit(1400)
    assert (fit.largest_batch_size, fit.largest_batch_bytes) == (2 * 46, 1000 + 30 * 46 - 1000)


def test_a_batch_larger_than_an_epoch_is_named():
    fit = Fit(2**30, "requested", 2**40, False, 2000, 2**29)
    assert "1024 samples" in _sentence(fit, 1024)
    assert "102,400%" in _sentence(fit, 1024)
    assert "1024 samples" not in _sentence(replace(fit, largest_batch_size=64), 1024)
    assert "epoch" not in _sentence(fit, None)
    assert "<0.01%" in _sentence(replace(fit, needed=1), None)


def test_memory_that_hardly_grows(monkeypatch):
    trials(monkeypatch, lambda n: 5)
    fit = find_fit(2000)
    assert (fit.fits, fit.largest_batch_size) == (True, None)
    assert str(memory.MOST_SAMPLES) in fit.no_largest


def test_without_a_size_there_is_no_answer(monkeypatch):
    trials(monkeypatch, lambda n: n)
    assert find_fit(None) is None


def test_many_plans_share_few_trials(monkeypatch):
    """single, ddp ×2, and ddp ×4 call the same model with 64, 32, and 16 samples. FSDP2 casts the
    model in another way, cp splits its sequences, and a compiled model has no estimate. One size
    needs a second trial."""
    asked = []

    def try_memory(questions):
        asked.extend((plan.strategy, sizes) for plan, sizes in questions)
        weight = Weight("w", 10, 250, P, True, 0, 0, 0)
        return [
            MemoryTrial((weight,), {}, (), tuple(Pass(n, 0, (n,), 0, 0, n, 0) for n in sizes), 0)
            for _, sizes in questions
        ]

    monkeypatch.setattr(memory, "try_memory", try_memory)
    single = resolve(Request("single"), MACHINE, SUMMARY, lambda name: None)
    plans = [single, make_plan(replicas=2), make_plan(replicas=4), make_plan("fsdp")]
    trials = {}
    cp = replace(single, strategy="cp", shards=2, sequence_plan=SequencePlan(2, ()))
    found = estimate_all([*plans, cp, replace(single, compile=True)], trials)
    assert asked == [("single", [16, 64]), ("fsdp", [32, 64]), ("cp", [64, 128])]
    assert [each.devices[0].activations for each in found[:5]] == [64, 32, 16, 32, 64]
    assert found[5].not_estimated
    asked.clear()
    [again] = estimate_all([make_plan(replicas=2, accumulate=4)], trials)  # 32 = 4 × 8
    assert (again.devices[0].activations, asked) == (8, [])


def test_what_cannot_be_estimated_has_a_reason(monkeypatch):
    monkeypatch.setattr(memory, "try_memory", lambda asked: ["the trial broke"])
    found = with_memory(make_plan()).memory
    assert (found.devices, found.not_estimated) == ((), "the trial broke")
    unknown = replace(make_plan(), strategy="new")
    assert "new" in with_memory(unknown).memory.not_estimated

    trials(monkeypatch, lambda n: n)
    copies = with_memory(resolve(Request("dp", replicas=2), MACHINE, SUMMARY, lambda name: None))
    assert copies.memory.peak is None
    assert copies.memory.no_peak


def test_ranks_that_share_a_gpu_share_its_memory():
    def device(rank, name, peak, staging=0):
        return DeviceEstimate(rank, name, 0, 0, 0, 0, None, None, None, 0, peak, staging)

    apart = MemoryEstimate((device(0, "cuda:0", 10), device(1, "cuda:1", 20)))
    shared = MemoryEstimate((device(0, "cuda:0", 10), device(1, "cuda:0", 20)))
    assert (apart.peak, shared.peak) == (20, 30)
    assert MemoryEstimate((device(0, "cuda:0", 10, 3), device(1, "cuda:0", 20, 3))).peak == 36
    assert MemoryEstimate((device(0, "cuda:0", 10), device(0, "cuda:1", None))).peak is None


def test_a_plan_with_an_estimate_survives_json(monkeypatch):
    trials(monkeypatch, lambda n: 10 * n)
    request = Request("ddp", replicas=2, steps=10)
    plan = with_fit(request, INSPECTED, make_plan(), 2000)
    assert Plan.from_json(plan.to_json()) == plan
