"""Results name the plan's device. `scale --device cpu` on a machine with a GPU once said "on 1
GPU"."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paralab.analyse.compare import comparison_of, comparison_of_runs
from paralab.analyse.phrases import machine_words
from paralab.experiment.planning import constraints
from paralab.machine.host import Gpu, Machine
from paralab.plan.plan import Plan
from paralab.show.open_folder import document_of

RUNS = Path(__file__).parent.parent / "runs"
GPU = {"name": "NVIDIA H200", "memory_bytes": 139 * 2**30, "capability": [9, 0]}


def with_a_gpu(name, folder, device="cpu"):
    """A recorded folder as a machine with a GPU would have written it."""
    shutil.copytree(RUNS / name, folder)
    for path in folder.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["machine"]["gpus"] = [GPU]
        if "plan" in manifest:
            manifest["plan"]["device"] = device
        path.write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize("name", ["ddp", "dp", "pipeline", "low_precision"])
def test_a_gpu_that_was_not_used_is_not_named(tmp_path, name):
    document = document_of(with_a_gpu(name, tmp_path / "run"))
    assert "H200" not in json.dumps(document.to_dict())
    assert "2 cores of AMD EPYC" in document.subtitle
    assert dict(document.facts)["machine"] == "2 cores of AMD EPYC"


def test_what_was_used_is_named(tmp_path):
    cpu, gpu = (
        with_a_gpu("ddp", tmp_path / "cpu"),
        with_a_gpu("ddp", tmp_path / "gpu", device="cuda"),
    )
    assert machine_words(comparison_of_runs([gpu])) == "1 GPU (NVIDIA H200)"
    assert (
        machine_words(comparison_of_runs([cpu, gpu]))
        == "1 GPU (NVIDIA H200) and 2 cores of AMD EPYC"
    )
    rows = comparison_of(with_a_gpu("low_precision", tmp_path / "compared"))["rows"]
    assert {row["device"] for row in rows} == {"cpu"}


def test_the_manifest_lists_the_memory_that_the_plan_uses():
    manifest = json.loads((RUNS / "killed" / "manifest.json").read_text())
    machine = Machine(
        **{
            **manifest["machine"],
            "backends": ("gloo",),
            "gpus": (Gpu("NVIDIA H200", 139 * 2**30, (9, 0)),),
        }
    )
    plan = Plan.from_json(manifest["plan"])
    summary = SimpleNamespace(**manifest["workload"])
    assert "H200" not in " ".join(constraints(plan, machine, summary))
    assert " ".join(constraints(replace(plan, device="cuda"), machine, summary)).count("H200") == 2
