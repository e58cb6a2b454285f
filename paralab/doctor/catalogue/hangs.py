"""Hangs and crashes: ranks that do not meet, or not in the same place."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="H01",
        title="Uneven number of batches per rank",
        symptom=(
            "Training freezes near the end of an epoch. gloo: 'Timed out waiting … for recv operation'; NCCL: a watchdog timeout."
        ),
        cause="One rank runs out of batches first and calls no backward any more; the others wait for its part of the all-reduce.",
        fix="Give every rank the same number of batches (DistributedSampler, drop_last), or train inside `with model.join():`.",
        wrong="""\
mine = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
loader = DataLoader(mine, batch_size=32)
""",
        right="""\
mine = DistributedSampler(data, drop_last=True)
loader = DataLoader(data, batch_size=32, sampler=mine)
""",
        sources=(
            "pytorch/pytorch#33148",
            "pytorch/pytorch#38174",
            "microsoft/PyMarlin#80",
            "Lightning-AI/pytorch-lightning#20404",
            "Lightning-AI/pytorch-lightning#9851",
        ),
    ),
    Entry(
        id="H02",
        title="One rank leaves early, with exit code 0",
        symptom=(
            "The other ranks die with 'Connection closed by peer', and torchrun reports one of them; the rank that "
            "left says nothing."
        ),
        cause="A `return` or `sys.exit(0)` is reached by one rank only, while the others still have collectives to do.",
        fix="Let all ranks leave at the same place; what one rank alone does must not end its process.",
        wrong="""\
if dist.get_rank() == 0 and os.path.exists("done"):
    sys.exit(0)
train(model, loader)
""",
        right="""\
done = torch.tensor(os.path.exists("done"), dtype=torch.int)
dist.broadcast(done, src=0)
if done:
    sys.exit(0)
train(model, loader)
""",
        sources=("pytorch/pytorch#122358",),
    ),
    Entry(
        id="H03",
        title="A collective that only some ranks call",
        symptom=(
            "Rank 0 waits in all_reduce, barrier or gather until the timeout; the other ranks wait in their next "
            "collective, or are gone."
        ),
        cause=(
            "The collective stands in a branch that only one rank enters (`if rank == 0:`), and it needs every rank of the group."
        ),
        fix="Call the collective on all ranks, and keep only the local work (printing, writing) in the branch.",
        wrong="""\
if dist.get_rank() == 0:
    dist.all_reduce(loss)
    print(loss.item())
""",
        right="""\
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print(loss.item())
""",
        sources=("alan-turing-institute/autocast#386",),
    ),
    Entry(
        id="H04",
        title="Collectives in a different order on different ranks",
        symptom="All ranks time out together, each in another collective.",
        cause=(
            "Collectives meet by their number, not by their name: the first call of one rank meets the first call of every other."
        ),
        fix="Take the same path through the collectives on every rank.",
        wrong="""\
if dist.get_rank() == 0:
    dist.broadcast(weights, src=0)
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)
    dist.broadcast(weights, src=0)
""",
        right="""\
dist.broadcast(weights, src=0)
dist.all_reduce(loss)
""",
        sources=(
            "pytorch/pytorch#22071",
            "pytorch/pytorch#78022",
            "pytorch/pytorch#100214",
            "modelscope/ms-swift#9443",
        ),
    ),
    Entry(
        id="H05",
        title="Two alike collectives swapped between ranks: wrong numbers, no error",
        symptom="Nothing is reported. Two reduced values are mixtures of each other: the loss holds a part of the accuracy.",
        cause="Same operation and same shape, called in another order on some ranks. They are paired by number, so nobody notices.",
        fix="Reduce in one order everywhere, or pack the values into one tensor and reduce that.",
        wrong="""\
if dist.get_rank() == 0:
    dist.all_reduce(loss)
    dist.all_reduce(accuracy)
else:
    dist.all_reduce(accuracy)
    dist.all_reduce(loss)
""",
        right="""\
both = torch.stack([loss, accuracy])
dist.all_reduce(both)
loss, accuracy = both
""",
        sources=("alan-turing-institute/autocast#386",),
        silent=True,
    ),
    Entry(
        id="H06",
        title="One collective, different tensor sizes",
        symptom=(
            "gloo: 'Received data size doesn't match expected size' and SIGABRT on one rank, 'Connection reset by "
            "peer' on the others."
        ),
        cause=(
            "all_gather and all_reduce need the same shape on every rank; a shorter last batch or another number of "
            "classes breaks it."
        ),
        fix="Pad to the largest size, use all_gather_object, or drop the last, shorter batch.",
        wrong="""\
outputs = model(last_batch)
parts = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
dist.all_gather(parts, outputs)
""",
        right="""\
outputs = model(last_batch)
parts = [None for _ in range(dist.get_world_size())]
dist.all_gather_object(parts, outputs.cpu())
""",
        sources=("pytorch/pytorch#79901",),
    ),
    Entry(
        id="H07",
        title="Validation on rank 0 through the DDP wrapper",
        symptom=(
            "Hang or crash at validation when the model has buffers (BatchNorm); NCCL shows OpType=BROADCAST. Without "
            "buffers it works."
        ),
        cause="DDP's forward broadcasts the buffers from rank 0, in eval mode and under no_grad too, and only rank 0 has come.",
        fix="Validate on all ranks, or call `model.module` in the branch of rank 0.",
        wrong="""\
if dist.get_rank() == 0:
    with torch.no_grad():
        predicted = model(x)
""",
        right="""\
if dist.get_rank() == 0:
    with torch.no_grad():
        predicted = model.module(x)
""",
        sources=(
            "pytorch/pytorch#53979",
            "pytorch/pytorch#137268",
            "LibreYOLO/libreyolo#594",
            "huggingface/accelerate#3861",
        ),
    ),
    Entry(
        id="H08",
        title="Stopping early on a metric of one's own",
        symptom="One rank leaves the loop; the others time out one step later.",
        cause="Every rank compares the loss of its own batches, so they decide differently.",
        fix="Reduce the metric, or broadcast the decision of rank 0, before anybody stops.",
        wrong="""\
if loss.item() < 0.01:
    break
""",
        right="""\
total = loss.detach().clone()
dist.all_reduce(total)
if total.item() / dist.get_world_size() < 0.01:
    break
""",
        sources=(
            "Lightning-AI/pytorch-lightning#379",
            "Lightning-AI/pytorch-lightning#3381",
            "speechbrain/speechbrain#2051",
        ),
    ),
    Entry(
        id="H09",
        title="A rank that does not say which GPU is its own",
        symptom="NCCL guesses the GPU from the rank and warns that this can hang; barrier() may never return.",
        cause="Neither `torch.cuda.set_device` nor `device_id=` was given, so the first collective has to guess.",
        fix="Set the device from LOCAL_RANK before the process group is made, and pass it as device_id.",
        wrong="""\
dist.init_process_group("nccl")
dist.barrier()
""",
        right="""\
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
dist.barrier()
""",
        sources=(
            "pytorch/pytorch#134617",
            "pytorch/pytorch#178977",
            "deepspeedai/DeepSpeed#7266",
            "pytorch/pytorch#159262",
        ),
        limits="Only NCCL guesses; on CPU ranks it can be read in the script and in logs, not provoked.",
    ),
    Entry(
        id="H13",
        title="Rank 0 prepares data for longer than the others wait",
        symptom="'Socket Timeout' while fetching the NCCL id from the store, or a watchdog timeout of a collective with NumelIn=1.",
        cause="The others stand in a barrier while rank 0 downloads or tokenises, and the barrier has the default time limit.",
        fix="Prepare the data before the job, or give init_process_group a `timeout` that is long enough.",
        wrong="""\
dist.init_process_group("nccl")
if dist.get_rank() == 0:
    download("https://example.org/corpus")
dist.barrier()
""",
        right="""\
dist.init_process_group("nccl", timeout=timedelta(hours=3))
if dist.get_rank() == 0:
    download("https://example.org/corpus")
dist.barrier()
""",
        sources=(
            "JIA-Lab-research/LongLoRA#45",
            "hiyouga/LlamaFactory#2424",
            "NVIDIA/nccl#865",
            "huggingface/accelerate#2528",
            "huggingface/transformers#17106",
        ),
    ),
    Entry(
        id="H14",
        title="A branch of the model that some ranks take and others do not",
        symptom="One rank: 'Expected to have finished reduction in the prior iteration'; the others lose the connection or hang.",
        cause=(
            "The data decide which layers are used (a batch without images skips the image tower), so the gradients "
            "differ in number."
        ),
        fix="`find_unused_parameters=True`, or let every branch take part with a term of weight 0.",
        wrong="""\
hidden = self.text(tokens)
if images is not None:
    hidden = hidden + self.vision(images)
""",
        right="""\
hidden = self.text(tokens)
seen = images if images is not None else torch.zeros(len(tokens), 3, 32, 32)
weight = float(images is not None)
hidden = hidden + weight * self.vision(seen)
""",
        sources=("modelscope/ms-swift#9443", "pytorch/pytorch#22049"),
    ),
    Entry(
        id="H15",
        title="The GPUs cannot talk to each other directly",
        symptom="All ranks freeze in the first all-reduce, with every GPU at 100 % load.",
        cause="PCIe access control (ACS), an IOMMU or the driver breaks the direct path between two GPUs.",
        fix="Switch ACS off or set iommu=pt; until then start with NCCL_P2P_DISABLE=1.",
        wrong="""\
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"])
""",
        right="""\
around = {**os.environ, "NCCL_P2P_DISABLE": "1"}
subprocess.run(["torchrun", "--nproc_per_node=2", "train.py"], env=around)
""",
        sources=(
            "NVIDIA/nccl#631",
            "pytorch/pytorch#85334",
            "NVIDIA/nccl#1160",
            "dmlc/xgboost#11242",
        ),
        limits="Needs two GPUs; what a log of it looks like is known, the cable itself is not looked at.",
    ),
)
