"""What DDP does and does not do: gradients, parameters, buffers, seeds, and what is logged."""

from __future__ import annotations

from paralab.doctor.entry import Entry

ENTRIES: tuple[Entry, ...] = (
    Entry(
        id="S01",
        title="Parameters that take no part in the loss",
        symptom="'Expected to have finished reduction in the prior iteration before starting a new one', one step after the cause.",
        cause="DDP waits for a gradient of every parameter; layers that forward or the loss leave out never deliver one.",
        fix="Remove or freeze them before wrapping, or say `find_unused_parameters=True`.",
        wrong="""\
model = Net()  # .auxiliary is not used in forward
model = DistributedDataParallel(model)
""",
        right="""\
model = Net()  # .auxiliary is not used in forward
model.auxiliary.requires_grad_(False)
model = DistributedDataParallel(model)
""",
        sources=("huggingface/accelerate#2017", "pytorch/pytorch#22049"),
    ),
    Entry(
        id="S02",
        title="One parameter is ready twice",
        symptom="'Expected to mark a variable ready only once', with the index or the name of a parameter.",
        cause=(
            "Reentrant activation checkpointing, shared weights or a use outside forward runs a parameter's hook "
            "twice in one backward."
        ),
        fix="`use_reentrant=False` in checkpoint(), and no find_unused_parameters with it; or static_graph=True.",
        wrong="""\
model = DistributedDataParallel(model, find_unused_parameters=True)
hidden = checkpoint(block, hidden, use_reentrant=True)
""",
        right="""\
model = DistributedDataParallel(model)
hidden = checkpoint(block, hidden, use_reentrant=False)
""",
        sources=(
            "huggingface/peft#313",
            "huggingface/accelerate#2017",
            "lucidrains/DALLE2-pytorch#225",
            "microsoft/FocalNet#4",
            "pytorch/pytorch#24005",
        ),
    ),
    Entry(
        id="S03",
        title="static_graph, and the graph changes",
        symptom="'your training graph has changed in this iteration … not compatible with static_graph set to True'.",
        cause="static_graph promises that every step uses the same parameters; a branch on the data breaks the promise.",
        fix="Leave static_graph out, or remove the branch.",
        wrong="""\
model = DistributedDataParallel(model, static_graph=True)
for step, x in enumerate(loader):
    model(x, with_head=step % 2 == 0).sum().backward()
""",
        right="""\
model = DistributedDataParallel(model, find_unused_parameters=True)
for step, x in enumerate(loader):
    model(x, with_head=step % 2 == 0).sum().backward()
""",
        sources=("pytorch/pytorch#97030", "pytorch/pytorch#79171"),
    ),
    Entry(
        id="S04",
        title="find_unused_parameters without need",
        symptom="'find_unused_parameters=True was specified … but did not find any unused parameters', and slower steps.",
        cause="DDP walks through the autograd graph in every step to look for parameters that are not there.",
        fix="Leave it out.",
        wrong="""\
model = DistributedDataParallel(model, find_unused_parameters=True)
""",
        right="""\
model = DistributedDataParallel(model)
""",
        sources=("ecmwf/WeatherGenerator#1280",),
    ),
    Entry(
        id="S05",
        title="Two forwards before backward, and buffers in between",
        symptom=(
            "'one of the variables needed for gradient computation has been modified by an inplace operation', with "
            "DDP and BatchNorm."
        ),
        cause="The second forward broadcasts the buffers again and overwrites what the first one keeps for its backward.",
        fix="Backward after each forward, one forward over both batches, or no broadcast of buffers (forward_sync_buffers=False).",
        wrong="""\
model = DistributedDataParallel(model)
loss = model(real).mean() - model(fake).mean()
loss.backward()
""",
        right="""\
model = DistributedDataParallel(model)
real_scores, fake_scores = model(torch.cat([real, fake])).chunk(2)
loss = real_scores.mean() - fake_scores.mean()
loss.backward()
""",
        sources=(
            "pytorch/pytorch#22095",
            "pytorch/pytorch#66504",
            "pytorch/pytorch#65907",
            "pytorch/pytorch#73332",
            "pytorch/pytorch#175024",
        ),
        limits="Could not be provoked with torch 2.12 and 2.13 on CPU, where DDP keeps the version counter; so only a suspicion.",
    ),
    Entry(
        id="S06",
        title="Forward past the wrapper, through model.module",
        symptom="No message. The ranks train different models, and the one of rank 0 is saved.",
        cause="`model.module(x)` skips DDP's forward, which arms the synchronization: the gradients stay on their rank.",
        fix="Train through the wrapper: `model(x)`; for another method let forward choose it by an argument.",
        wrong="""\
model = DistributedDataParallel(net)
loss = criterion(model.module(x), y)
loss.backward()
""",
        right="""\
model = DistributedDataParallel(net)
loss = criterion(model(x), y)
loss.backward()
""",
        sources=("jingyaogong/minimind#853", "moojink/openvla-oft#160", "k2-fsa/icefall#226"),
        silent=True,
    ),
    Entry(
        id="S07",
        title="requires_grad changed after wrapping",
        symptom=(
            "Unfrozen after wrapping: no message, and those gradients differ from rank to rank. Frozen after wrapping: S01's error."
        ),
        cause="DDP decides when the model is wrapped which parameters it synchronizes.",
        fix="Freeze and unfreeze before wrapping, or wrap again.",
        wrong="""\
model = DistributedDataParallel(net)
for parameter in net.backbone.parameters():
    parameter.requires_grad = True
""",
        right="""\
for parameter in net.backbone.parameters():
    parameter.requires_grad = True
model = DistributedDataParallel(net)
""",
        sources=("huggingface/transformers#416", "JDAI-CV/fast-reid#178"),
        silent=True,
    ),
    Entry(
        id="S08",
        title="Only rank 0 takes the optimizer step",
        symptom="No message. Rank 0 learns, the others keep their first weights and send gradients that no longer fit.",
        cause="DDP synchronizes gradients, never parameters: every rank must apply the same step itself.",
        fix="Step on every rank.",
        wrong="""\
loss.backward()
if dist.get_rank() == 0:
    optimizer.step()
""",
        right="""\
loss.backward()
optimizer.step()
""",
        silent=True,
    ),
    Entry(
        id="S09",
        title="BatchNorm sees the small batch of one rank",
        symptom="Less accurate than on one GPU, or 'Expected more than 1 value per channel when training' on the last batch.",
        cause="Every rank normalizes with its own few samples, and only the running statistics of rank 0 are kept.",
        fix="`SyncBatchNorm.convert_sync_batchnorm` (GPU only), larger batches per rank, drop_last=True.",
        wrong="""\
model = DistributedDataParallel(net_with_batch_norm.to(device), device_ids=[device.index])
""",
        right="""\
model = SyncBatchNorm.convert_sync_batchnorm(net_with_batch_norm).to(device)
model = DistributedDataParallel(model, device_ids=[device.index])
""",
        sources=(
            "LibreYOLO/libreyolo#531",
            "ultralytics/yolov5#401",
            "pytorch/pytorch#2584",
            "pytorch/pytorch#49794",
            "MCG-NJU/TDN#22",
        ),
    ),
    Entry(
        id="S10",
        title="The same random numbers on every rank",
        symptom="No message. Dropout masks and augmentations are the same on all ranks, so there is less variety than it seems.",
        cause="torch.manual_seed gets the same number everywhere, and the loader's workers take their seeds from it.",
        fix="Build the model, then seed with `seed + rank`.",
        wrong="""\
torch.manual_seed(42)
model = DistributedDataParallel(Net())
""",
        right="""\
torch.manual_seed(42)
model = DistributedDataParallel(Net())
torch.manual_seed(42 + dist.get_rank())
""",
        sources=(
            "huggingface/transformers#37932",
            "nnaisense/bayesian-flow-networks#3",
            "huggingface/pytorch-image-models#1519",
            "pytorch/pytorch#3880",
        ),
        silent=True,
    ),
    Entry(
        id="S11",
        title="Gradients averaged by hand, from different first weights",
        symptom="No message. The ranks start apart and never meet, although every gradient is synchronized.",
        cause="DDP copies the weights of rank 0 when it wraps a model; code that reduces gradients itself has to do it too.",
        fix="Broadcast every parameter and buffer from rank 0 before the first step.",
        wrong="""\
model = Net()
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average_over_ranks)
""",
        right="""\
model = Net()
for tensor in model.state_dict().values():
    dist.broadcast(tensor, src=0)
for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(average_over_ranks)
""",
        silent=True,
    ),
    Entry(
        id="S12",
        title="The wrapped model goes to the CPU and back",
        symptom="No message. From then on no gradient is synchronized.",
        cause="The move can replace the parameters that DDP has hooks on.",
        fix="Copy the state_dict to the CPU instead of the model, or wrap again.",
        wrong="""\
model = DistributedDataParallel(net)
torch.save(model.cpu().module.state_dict(), "net.pt")
model.cuda()
""",
        right="""\
model = DistributedDataParallel(net)
torch.save({name: tensor.cpu() for name, tensor in model.module.state_dict().items()}, "net.pt")
""",
        sources=("pytorch/pytorch#104336",),
        silent=True,
        limits="Needs a GPU to happen; on CPU ranks the move changes nothing, so it is read in the script only.",
    ),
    Entry(
        id="S13",
        title="all_reduce of a loss that is still part of the graph",
        symptom="'c10d::allreduce_: an autograd kernel was not registered … may lead to silently incorrect behavior'.",
        cause="The collective overwrites a value that backward still needs, and autograd knows nothing of it.",
        fix="Reduce a copy: `loss.detach().clone()`.",
        wrong="""\
dist.all_reduce(loss)
loss.backward()
""",
        right="""\
shown = loss.detach().clone()
dist.all_reduce(shown)
loss.backward()
""",
    ),
    Entry(
        id="S14",
        title="The logged number is of one rank, or a sum",
        symptom="A noisy curve, or one that is as many times too high as there are ranks.",
        cause="Rank 0 logs the loss of its own share, or all_reduce (a sum, if nothing else is said) is not divided.",
        fix="all_reduce, then divide by the world size; log that.",
        wrong="""\
shown = loss.detach().clone()
dist.all_reduce(shown)
print("loss", shown.item())
""",
        right="""\
shown = loss.detach().clone()
dist.all_reduce(shown)
print("loss", shown.item() / dist.get_world_size())
""",
        sources=(
            "Lightning-AI/pytorch-lightning#13364",
            "roboflow/rf-detr#909",
            "Lightning-AI/pytorch-lightning#19072",
        ),
    ),
    Entry(
        id="S15",
        title="More ranks, same learning rate",
        symptom="Fewer steps per epoch and slower progress than on one device; or a learning rate that was scaled twice.",
        cause="DDP averages over a batch that is as many times larger as there are ranks, so each epoch has fewer, better steps.",
        fix="Keep the global batch, or adapt the learning rate to it (in proportion, or by the square root), once.",
        wrong="""\
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
optimizer = SGD(model.parameters(), lr=0.1)
""",
        right="""\
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
optimizer = SGD(model.parameters(), lr=0.1 * dist.get_world_size())
""",
        limits="Which rate was meant is not written anywhere: it can be pointed out, never proved.",
    ),
    Entry(
        id="S16",
        title="The batch of one rank is as large as the global batch",
        symptom="Out of memory, or a batch that is as many times larger as there are ranks.",
        cause="`batch_size` counts samples per rank; the number from the single-device script was taken over.",
        fix="Divide it by the world size.",
        wrong="""\
GLOBAL_BATCH = 256
loader = DataLoader(data, batch_size=GLOBAL_BATCH, sampler=DistributedSampler(data))
""",
        right="""\
GLOBAL_BATCH = 256
loader = DataLoader(data, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
""",
        limits="Only names (global_batch, total_batch) tell what was meant, so it stays a suspicion.",
    ),
    Entry(
        id="S17",
        title="A gradient is laid out otherwise than its bucket",
        symptom="'Grad strides do not match bucket view strides', once, without a name.",
        cause=(
            "DDP lays out its buckets as the parameters were when it wrapped them; a model that goes to channels_last afterwards "
            "has gradients in another memory order. A 1×1 convolution of permuted or channels_last data differs in name only."
        ),
        fix="Change the layout before wrapping, `.contiguous()` after permute; for 1×1 convolutions it costs nothing and can stay.",
        wrong="""\
model = DistributedDataParallel(model)
model.to(memory_format=torch.channels_last)
""",
        right="""\
model.to(memory_format=torch.channels_last)
model = DistributedDataParallel(model)
""",
        sources=("pytorch/pytorch#47163", "CompVis/latent-diffusion#281", "XPixelGroup/HAT#154"),
    ),
)
