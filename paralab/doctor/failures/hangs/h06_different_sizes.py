"""H06: Ranks pass tensors of different sizes to one collective.

Symptom: gloo: 'Received data size doesn't match expected size' on one rank, 'Connection reset by peer' on the others.
Cause: all_gather and all_reduce need the same shape on every rank, but on one rank, for example, the last batch is shorter.
Fix: Pad to the largest size, use all_gather_object, or drop the shorter last batch.
Reported: pytorch/pytorch#79901

  outputs = model(last_batch)
- parts = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
- dist.all_gather(parts, outputs)
+ parts = [None for _ in range(dist.get_world_size())]
+ dist.all_gather_object(parts, outputs.cpu())
"""

from paralab.doctor.registry import describe, printed

ENTRY = describe(
    __doc__,
    printed(
        r"Detected mismatch between collectives on ranks\. Rank (?P<rank>\d+) is running collective: "
        r"CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?OpType=(?P<call>\w+)"
        r"(?:, TensorShape=(?P<mine>\[[\d, ]*\]))?.*?but Rank (?P<other>\d+) is running collective: "
        r"CollectiveFingerPrint\((?:SequenceNumber=\d+, )?OpType=\w+(?:, TensorShape=(?P<its>\[[\d, ]*\]))?",
        "At collective {number}, rank {rank} calls {call} with shape {mine}, and rank {other} "
        "calls it with shape {its}{at}.",
        blames=False,
    ),
    *(
        printed(pattern, why, blames=False)  # paralab.collectives
        for pattern, why in (
            (
                r"Ranks make different calls: call (?P<number>\d+) of rank (?P<rank>\d+) is "
                r"(?P<call>[\w()]+(?: with root \d+)?) of (?P<mine>\w+ \[[\d, ]*\]).*?, but rank "
                r"(?P<other>\d+) calls (?P=call) of (?P<its>\w+ \[[\d, ]*\])",
                "At collective {number}, rank {rank} calls {call} with {mine}, and rank {other} "
                "calls it with {its}{at}.",
            ),
            (
                r"Sizes differ in (?P<call>\w+) \(call (?P<number>\d+)\): rank (?P<rank>\d+) sends "
                r"(?P<mine>[\d,]+) bytes to rank (?P<other>\d+), which expects (?P<its>[\d,]+)",
                "At collective {number}, a {call}, rank {rank} sends {mine} bytes to rank {other}, "
                "which expects {its}{at}.",
            ),
            (
                r"Rank (?P<rank>\d+) sent (?P<mine>[\d,]+ bytes of \w+) with tag \d+, but rank "
                r"(?P<other>\d+) receives (?P<its>[\d,]+ bytes of \w+)",
                "Rank {rank} sends {mine}, but rank {other} receives {its}{at}.",
            ),
        )
    ),
)
