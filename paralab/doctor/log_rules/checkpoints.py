"""What loading and saving says."""

from __future__ import annotations

from collections.abc import Iterator

from paralab.doctor.finding import Finding
from paralab.doctor.logs.job import Logs
from paralab.doctor.logs.said import claims, errors
from paralab.doctor.registry import check

PREFIX = claims(
    r"Error\(s\) in loading state_dict for (\w+):.*(?:Missing|Unexpected) key\(s\) in state_dict:.*\"module\."
)
CORRUPT = claims(r"PytorchStreamReader failed (?:reading|locating|finding)")


@check("C01", source="log")
def module_prefix(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, PREFIX):
        text = said.match.string
        unexpected = text.partition("Unexpected key(s)")[2]
        saved = '"module.' in unexpected
        why = (
            "was saved from the DDP or DataParallel wrapper"
            if saved
            else "was saved from the plain model and is loaded into a wrapper"
        )
        yield said.finding(
            "C01",
            "error",
            f"The keys begin with `module.` on one side only{said.at}: the checkpoint {why}.",
            "save model.module.state_dict() and load into the model before it is wrapped (or into model.module)",
        )


@check("C03", source="log")
def torn_file(logs: Logs) -> Iterator[Finding]:
    if said := errors(logs, CORRUPT):
        yield said.finding(
            "C03",
            "suspect",
            f"{said.who} reads a checkpoint{said.at} that is torn: several ranks wrote the same file at once, or a writer was "
            "killed. Certain if torch.save is not under a rank-0 condition.",
            'if rank == 0: torch.save(state, "tmp"); os.replace("tmp", path); then dist.barrier() on all ranks before '
            "anybody reads",
        )
