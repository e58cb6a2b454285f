"""H19: TORCH_DISTRIBUTED_DEBUG=DETAIL crashes the job.

Symptom: Healthy scripts with DDP on gloo die with SIGSEGV (exit code -11) while DDP wraps the model.
Cause: The extra checks that DETAIL turns on have a bug in torch itself (seen with 2.12 and 2.13).
Fix: Use INFO. To find mismatched collectives, use the Flight Recorder or `paralab doctor -- COMMAND`.
Limits: Seen on gloo; NCCL is untested. The script does not show variables that are set outside it.
Reported: pytorch/pytorch#148976 #129672 #178977 #75011

- os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
+ os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
  import torch  # reads the variable

  dist.init_process_group("gloo")
  model = DistributedDataParallel(model)
"""

import ast

from paralab.doctor.events import Wrap
from paralab.doctor.failures.hangs.groups import backends, environment
from paralab.doctor.observation import Observation, WatchedRank
from paralab.doctor.preflight import Facts
from paralab.doctor.rank_checks import make_finding
from paralab.doctor.registry import Findings, check, describe
from paralab.doctor.static import report
from paralab.doctor.static.names import DDP
from paralab.doctor.static.script import Script
from paralab.units import plural

ENTRY = describe(__doc__, silent=True)


@check("H19", source="ranks")
def died_while_wrapping(seen: Observation) -> Findings:
    if not seen.over or seen.ended_by_us:
        return
    gone = [(rank, wrap) for rank in seen.ranks if (wrap := _died_wrapping(rank)) is not None]
    for rank, wrap in gone[:1]:
        why = (
            f"{plural(len(gone), 'rank')} of {len(seen.ranks)} died while DDP wrapped the model. On gloo, the "
            f"checks of TORCH_DISTRIBUTED_DEBUG=DETAIL crash torch {rank.start.torch} itself (SIGSEGV)."
        )
        yield make_finding("H19", "error", why, wrap)


def _died_wrapping(rank: WatchedRank) -> Wrap | None:
    inner = rank.doing[-1] if rank.doing else None
    if rank.lives is not False or rank.reached_end or rank.raised:
        return None
    if not isinstance(inner, Wrap) or inner.kind != "ddp":
        return None
    return inner if inner.options.get("debug") == "DETAIL" else None


@check("H19", source="script")
def debug_level_detail(script: Script) -> Findings:
    """Report DETAIL with DDP on gloo. torch reads the variable on import."""
    wraps = script.calls_of(DDP)
    if not wraps or not backends(script) & {"gloo", "default", "unknown"}:
        return
    places: list[report.At] = [
        call
        for call in script.calls_of("torch.distributed.set_debug_level")
        if call.node.args and report.code(call.node.args[0]).endswith("DETAIL")
    ]
    main = script.modules[0]
    imports = [
        node.lineno
        for node in main.nodes
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "torch" in report.code(node, 200)
    ]
    for name, value, place in environment(script):
        again = script.methods("set_debug_level_from_env")
        before = again or (place.module is main and place.line < min(imports, default=0))
        if name == "TORCH_DISTRIBUTED_DEBUG" and str(value).upper() == "DETAIL" and before:
            places.append(place)
    for at in places:
        why = f"DETAIL crashes torch 2.12 and 2.13 on gloo: every rank dies with SIGSEGV in DDP's constructor ({report.line_of(wraps[0], at)})."
        yield report.found(script, "H19", "suspect", at, why, also=(wraps[0],))


@check("H19", source="machine")
def debug_level_in_environment(facts: Facts) -> Findings:
    if facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() != "DETAIL":
        return
    version = facts.torch.version if facts.torch else ""
    certain = version.startswith(("2.12", "2.13")) and not facts.gpus
    why = (
        "TORCH_DISTRIBUTED_DEBUG=DETAIL crashes DistributedDataParallel on gloo "
        f"({f'torch {version}' if version else 'this torch'}, SIGSEGV), even in a healthy script."
    )
    doubt = "" if certain else "if your backend is gloo and torch is 2.12 or 2.13"
    evidence = facts.evidence("TORCH_DISTRIBUTED_DEBUG")
    yield make_finding("H19", "error", why, None, evidence, doubt=doubt)
