"""The Python interface: options, results, errors, and functions that are not in a file."""

import inspect
import os
import subprocess
import sys
from typing import get_type_hints

import pytest
import torch
from torch import nn

import paralab
from paralab import api
from paralab.errors import UsageError
from paralab.launch.run_options import RunOptions
from paralab.plan.option import options_of
from paralab.plan.request import Request
from tests.conftest import ROOT


def mine():
    data = torch.randn(64, 4), torch.randn(64, 2)
    return paralab.Workload(
        model=lambda: nn.Linear(4, 2), data=data, loss=nn.functional.mse_loss, batch_size=16
    )


@pytest.mark.processes
def test_run_takes_a_function_of_a_file(tmp_path):
    result = paralab.run(mine, "dp", replicas=2, steps=3, out=tmp_path / "run")
    assert result.strategy == "dp"
    assert len(result["losses"]) == 3  # the same as result.losses, for notebooks
    assert result.to_dict()["step_seconds"]["median"] == result.step_seconds.median


@pytest.mark.processes
def test_verify_returns_the_configurations(tmp_path):
    proof = paralab.verify(
        mine,
        "pipeline",
        stages=1,
        micro_batches=3,
        accumulate=1,
        samples=32,
        out=tmp_path / "proof",
    )
    assert proof.passed
    assert [each.equal for each in proof.configurations] == [True]


def test_errors_are_exceptions_with_the_fix():
    with pytest.raises(paralab.UsageError, match="'ddp'"):
        paralab.run("mlp", "dddp")
    with pytest.raises(paralab.UsageError) as refused:
        paralab.run(mine(), "ddp")
    assert "paralab.run(" in refused.value.fix
    with pytest.raises(paralab.UsageError) as refused:
        paralab.compare("mlp", "ddp")
    assert "['ddp']" in refused.value.fix


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": "x"},
        {"steps": 1.5},  # this trained, and then the manifest could not be read
        {"replicas": True},
        {"seed": None},
        {"bucket_mb": "4"},
        {"keep_checkpoints": 2.5},
        {"step_deadline": None},
    ],
)
def test_an_option_of_another_type_is_refused(options):
    [name] = options
    with pytest.raises(UsageError) as refused:
        paralab.run("mlp:tiny", "ddp", **options)
    assert refused.value.problem.startswith(f"{name}=")


def test_the_signatures_list_the_options():
    configuration = {option.name: option for option in options_of(Request)}
    of_run = configuration | {option.name: option for option in options_of(RunOptions)}
    for function, known in ((paralab.run, of_run), (paralab.verify, configuration)):
        parameters = inspect.signature(function).parameters
        for name in known.keys() - {"workload"}:
            parameter = parameters[name]
            assert parameter.default == known[name].default
            assert parameter.annotation == known[name].annotation
            assert known[name].help in function.__doc__
    assert configuration.keys() <= inspect.signature(paralab.compare).parameters.keys()


def test_what_editors_see_is_what_the_options_are():
    expected = {option.name: option.annotation for option in api.ALL}
    assert get_type_hints(api.AllOptions) == expected
    configuration = {option.name: option.annotation for option in api.CONFIGURATION}
    assert get_type_hints(api.ConfigurationOptions) == configuration


@pytest.mark.processes
def test_dir_lists_the_public_names_and_importing_them_is_cheap():
    assert {"run", "compare", "verify", "Workload", "UsageError"} <= set(dir(paralab))
    code = "import sys, paralab; dir(paralab); sys.exit(bool({'torch', 'click'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("function", [paralab.run, paralab.verify, paralab.compare])
def test_a_misspelled_option_gets_the_nearest_right_one(function):
    with pytest.raises(paralab.UsageError) as refused:
        function(
            "mlp", **({"strategy": "ddp"} if function is not paralab.compare else {}), replica=2
        )
    assert "'replicas'" in refused.value.problem


NOTEBOOK = """
import torch, paralab
from torch import nn
width = 8
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    def forward(self, x):
        return self.layers(x)
def cell():
    data = torch.ones(64, 4), torch.ones(64, 2)
    return dict(model=Net, data=data, loss=nn.functional.mse_loss, batch_size=16)
result = paralab.run(cell, "ddp", replicas=2, steps=4, out="run")
assert result["losses"][-1] < result["losses"][0], result
print("steps", result["steps"])
"""


@pytest.mark.processes
def test_a_function_that_is_in_no_file_reaches_the_ranks(tmp_path):
    pytest.importorskip(
        "cloudpickle",
        reason="functions of a notebook travel by cloudpickle: pip install cloudpickle",
    )
    done = subprocess.run(
        [sys.executable, "-"],
        input=NOTEBOOK,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "steps 4\n", done.stderr
