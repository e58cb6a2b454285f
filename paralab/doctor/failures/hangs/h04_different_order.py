"""H04: Ranks call collectives in different orders.

Symptom: All ranks time out together, each in a different collective.
Cause: Ranks match collectives by their order, not by name: the first call on one rank pairs with the first call on every other.
Fix: Call the same collectives in the same order on every rank.
Reported: pytorch/pytorch#22071 #78022 #100214 modelscope/ms-swift#9443

- if dist.get_rank() == 0:
-     dist.broadcast(weights, src=0)
-     dist.all_reduce(loss)
- else:
-     dist.all_reduce(loss)
-     dist.broadcast(weights, src=0)
+ dist.broadcast(weights, src=0)
+ dist.all_reduce(loss)
"""

from paralab.doctor.registry import describe, printed

ENTRY = describe(
    __doc__,
    printed(
        r"Detected mismatch between collectives on ranks\. Rank (?P<rank>\d+) is running collective: "
        r"CollectiveFingerPrint\((?:SequenceNumber=(?P<number>\d+), )?OpType=(?P<mine>\w+)\b.*?but Rank "
        r"(?P<other>\d+) is running collective: CollectiveFingerPrint\((?:SequenceNumber=\d+, )?"
        r"OpType=(?!(?P=mine)\b)(?P<its>\w+)",
        "At collective {number}, rank {rank} calls {mine}, and rank {other} calls {its}{at}. Ranks "
        "match collectives by their order, not by name.",
        blames=False,
    ),
    printed(  # paralab.collectives
        r"Ranks make different calls: call (?P<number>\d+) of rank (?P<rank>\d+) is "
        r"(?P<mine>(?P<call>[\w()]++(?: with root \d+)?+)[^,]*?(?: \[[\d, ]*\])?), but rank (?P<other>\d+) calls "
        r"(?P<its>(?!(?P=call) of )\w+[^.]*)",
        "At collective {number}, rank {rank} calls {mine}, and rank {other} calls {its}{at}. Ranks "
        "match collectives by their order, not by name.",
        blames=False,
    ),
)
