"""The doctor on one GPU: real messages from NCCL and CUDA, and ranks with tensors on a device."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paralab.doctor.catalog import apply
from paralab.doctor.logs.reading import read_logs
from tests.conftest import run_paralab

pytestmark = pytest.mark.gpu
CORPUS = Path(__file__).parent / "corpus"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def diagnose_log(log, *command):
    """Return the doctor's findings in the log of a command that fails or warns."""
    with log.open("w") as file:
        subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return {finding.id: finding for finding in apply("log", read_logs([log]))}


@pytest.mark.parametrize(("entry", "ranks"), [("L03", 2), ("H09", 1)])
def test_messages_of_nccl(tmp_path, entry, ranks):
    found = diagnose_log(
        tmp_path / "job.log",
        *TORCHRUN,
        f"--nproc_per_node={ranks}",
        str(CORPUS / entry / "broken.py"),
    )
    assert entry in found, (tmp_path / "job.log").read_text()[-3000:]


MESSAGES = {
    "D01": """
        class WithLoss(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(8, 4)
            def forward(self, x):
                return self.inner(x).square().mean()
        model = torch.nn.DataParallel(WithLoss().cuda(), device_ids=[0, 0])
        model(torch.randn(8, 8).cuda()).backward()
        """,
    "A06": """
        model = torch.nn.Linear(8, 4).cuda().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        scaler.scale(model(torch.randn(8, 8).cuda().bfloat16()).square().mean()).backward()
        scaler.step(optimizer)
        """,
    "H11": "torch.empty(1 << 44, device='cuda')",
}


@pytest.mark.parametrize("entry", MESSAGES)
def test_messages_of_cuda(tmp_path, entry):
    script = tmp_path / "train.py"
    script.write_text("import torch\n" + textwrap.dedent(MESSAGES[entry]))
    found = diagnose_log(tmp_path / "job.log", sys.executable, str(script))
    assert entry in found, (tmp_path / "job.log").read_text()[-3000:]
    assert found[entry].line is None or found[entry].file.endswith("train.py")


TRAINING = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.cuda.set_device(0)
torch.manual_seed(1 + rank)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = MODEL(torch.randn(16, 8, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(("called", "found"), [("model", set()), ("model.module", {"S06"})])
def test_ranks_that_share_a_gpu_are_observed(tmp_path, called, found):
    (tmp_path / "train.py").write_text(TRAINING.replace("MODEL", called))
    command = ["doctor", "--json", "--", *TORCHRUN, "--nproc_per_node=2", "train.py"]
    result = run_paralab(*command, cwd=tmp_path, seconds=150)
    errors = {
        finding["id"]
        for finding in json.loads(result.out)["findings"]
        if finding["severity"] == "error"
    }
    assert errors == found, result.out


PINNED = """
import gc
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    model = nn.DataParallel(layers.cuda(), device_ids=[0, 0])
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    data = TensorDataset(torch.randn(640, 8), torch.randint(0, 4, (640,)))
    loader = DataLoader(data, batch_size=32, shuffle=True, pin_memory=True, num_workers=2, worker_init_fn=lambda _: gc.collect())
    for epoch in range(6):
        for inputs, targets in loader:
            inputs, targets = inputs.cuda(non_blocking=True), targets.cuda(non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""


def test_workers_of_a_loader_with_pinned_memory_live(tmp_path):
    """DataLoader workers are forked from a rank that has used CUDA, and must not free any of its
    memory. Mixed precision with DataParallel is fine."""
    (tmp_path / "train.py").write_text(PINNED)
    result = run_paralab(
        "doctor", "--json", "--", sys.executable, "train.py", cwd=tmp_path, seconds=150
    )
    assert (result.code, json.loads(result.out)["findings"]) == (0, []), result.err


def test_preflight_sees_the_gpu(tmp_path):
    result = run_paralab("doctor", "--json", cwd=tmp_path, seconds=120)
    assert result.code in (0, 1)
    assert "NVIDIA" in result.out


def test_a_recorded_run_that_mostly_communicates(tmp_path):
    folder = run_paralab(
        "run", "ddp", "--steps", "8", "--device", "cuda", "--json", cwd=tmp_path
    ).json["run_folder"]
    result = run_paralab("doctor", folder, "--json", cwd=tmp_path)
    assert any(finding["id"] == "W01" for finding in json.loads(result.out)["findings"]), result.out
