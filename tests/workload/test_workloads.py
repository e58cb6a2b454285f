"""Built-in workloads, users' files, and errors for wrong files."""

import pytest
import torch

from paralab.errors import UsageError
from paralab.workload import gpt
from paralab.workload.batch import call_model, map_tensors, num_samples, unpack
from paralab.workload.catalog import BUILT_IN, built_in_names
from paralab.workload.gpt import IGNORED, PAD, library_tokens, real_bytes
from paralab.workload.load import load_workload
from paralab.workload.reference import check_reference


@pytest.mark.parametrize("family", BUILT_IN)
def test_a_built_in_workload_learns(family):
    workload = load_workload(f"{family}:tiny")
    torch.manual_seed(0)
    model, losses = workload.model(), []
    optimizer = workload.optimizer(model.parameters())
    for _ in range(30):
        inputs, targets = unpack(map_tensors(lambda t: t[: workload.batch_size], workload.data))
        loss = workload.loss(call_model(model, inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_mlp_has_as_many_logits_as_classes():
    # The workload once had 1024 logits for labels from 0 to 9.
    workload = load_workload("mlp")
    inputs, labels = workload.data
    logits = workload.model()(inputs[:2])
    assert logits.shape[1] == len(labels.unique()) == 10
    assert "10 classes" in workload.data_path


def test_mlp_faint_is_mlp_small_with_a_tiny_share_of_its_loss():
    output, target = torch.randn(4, 10), torch.tensor([1, 2, 3, 4])
    faint, small = (
        load_workload(f"mlp:{size}").loss(output, target) for size in ("faint", "small")
    )
    assert faint.item() == pytest.approx(small.item() / 100_000)


def test_gpt_124m_has_the_size_of_its_name():
    numbers = {**BUILT_IN["gpt"].sizes["124m"], "samples": 1}
    workload = gpt.build("gpt:124m", **numbers)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in workload.model().parameters())
    assert parameters == pytest.approx(124e6, rel=0.01)
    assert {"mlp", "mlp:small", "cnn", "gpt", "gpt:124m"} <= set(built_in_names())


def test_texts_have_different_lengths_and_the_padding_is_ignored():
    inputs, targets = library_tokens(64, 32)
    lengths = (targets != IGNORED).sum(1)
    assert lengths.unique().numel() > 5
    assert 16 <= int(lengths.min()) <= int(lengths.max()) == 32
    assert torch.equal(inputs == PAD, targets == IGNORED)
    assert torch.equal(
        inputs[:, 1:][targets[:, 1:] != IGNORED], targets[:, :-1][targets[:, 1:] != IGNORED]
    )
    assert real_bytes((inputs, targets)) == float(lengths.sum())


FILE = """
import torch
from torch import nn
from paralab import Workload

def good():
    data = torch.randn(8, 4), torch.randn(8, 2)
    return Workload(model=lambda: nn.Linear(4, 2), data=data, loss=nn.functional.mse_loss)

def as_dict():
    data = torch.randn(8, 4), torch.randn(8, 2)
    return {"model": lambda: nn.Linear(4, 2), "data": data, "loss": nn.functional.mse_loss}

def helper():
    return undefined_name

def fails():
    return helper()

def wrong_keys():
    return {"model": nn.Linear, "date": 1}

def not_callable():
    return {"model": nn.Linear(4, 2), "data": None, "loss": print}

def exits():
    raise SystemExit("usage: mine.py [-h]")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_users_file(file):
    assert load_workload(f"{file}:good").name == "mine.py:good"
    assert load_workload(f"{file}:as_dict").batch_size == 64


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("fails", "NameError.*undefined_name"),
        ("wrong_keys", "unknown date and without data, loss"),
        ("not_callable", "model .* Linear"),
        ("exits", "SystemExit: usage: mine.py"),  # such as a script that parses arguments
        ("goood", "Did you mean 'good'"),
    ],
)
def test_the_error_names_what_is_wrong_in_a_file(file, function, problem):
    with pytest.raises(UsageError, match=problem):
        load_workload(f"{file}:{function}")


def test_the_traceback_is_trimmed_to_the_users_lines(file):
    with pytest.raises(UsageError) as failed:
        load_workload(f"{file}:fails")
    lines = [line for line in failed.value.detail.splitlines() if line.strip().startswith("File")]
    assert [line.rpartition(" in ")[2] for line in lines] == ["fails", "helper"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("import nothing_like_this", "nothing_like_this"), ("def f(:", "def f(:"), ("1/0", "1/0")],
)
def test_a_file_that_fails_to_import_shows_their_line_only(tmp_path, text, shown):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match="could not be imported") as failed:
        load_workload(f"{tmp_path}/broken.py:f")
    assert shown in failed.value.detail
    assert "frozen" not in failed.value.detail


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("mpl", "Did you mean 'mlp'"),
        ("gpt:125m", "Did you mean 'gpt:124m'"),
        ("nowhere.py:f", "no file"),
        ("x/", "no file"),
    ],
)
def test_a_wrong_name_is_refused_without_torch(reference, problem):
    with pytest.raises(UsageError, match=problem):
        check_reference(reference)


def test_a_file_without_its_suffix_is_not_a_built_in_name(tmp_path, monkeypatch):
    (tmp_path / "net.py").touch()
    monkeypatch.chdir(tmp_path)
    for reference, meant in (("net", "net.py:function"), ("net:tiny", "net.py:tiny")):
        with pytest.raises(UsageError) as refused:
            check_reference(reference)
        assert refused.value.fix == meant


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ((torch.zeros(0, 4), torch.zeros(0)), "no samples"),
        ("data.csv", "no tensors.* str"),
        ((torch.zeros(3, 4), torch.zeros(2)), r"different lengths.*\(3, 4\), \(2,\)"),
        ((torch.zeros(3, 4), torch.tensor(1.0)), "different lengths"),
    ],
)
def test_data_without_samples_is_refused(batch, problem):
    with pytest.raises(UsageError, match=problem):
        num_samples(batch)


def test_unpack_takes_the_usual_batches():
    x, y = torch.zeros(2), torch.ones(2)
    assert unpack((x, y)) == (x, y)
    assert unpack({"input": x, "target": y}) == (x, y)
    assert unpack(x)[1] is x
    with pytest.raises(UsageError, match="a dict with"):
        unpack({"image": x, "label": y})


def test_data_made_at_random_is_the_same_in_every_process(tmp_path):
    """Otherwise ranks would silently train on different samples."""
    path = tmp_path / "random_data.py"
    path.write_text(
        "import torch\nX = torch.randn(4)\n"
        "def f():\n    return dict(model=torch.nn.Identity, data=(X, torch.randn(4)), loss=print)\n"
    )
    torch.manual_seed(1)
    first = load_workload(f"{path}:f").data
    torch.manual_seed(2)
    second = load_workload(f"{path}:f").data
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
