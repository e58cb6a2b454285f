"""L10: bf16 crashes on this CPU with an illegal instruction.

Symptom: 'Fatal Python error: Illegal instruction' in a Linear under CPU autocast; exit code 132 or signal 4.
Cause: The CPU reports AMX, but this virtual machine probably does not allow its instructions.
Fix: Set `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` before importing torch.
Limits: We had no CPU that reports AMX but crashes on it. Only logs and the machine check show this
failure.

+ import os
+
+ os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
  import torch

  with torch.autocast("cpu", dtype=torch.bfloat16):
      loss = model(x).mean()
"""

from paralab.doctor.preflight import Facts
from paralab.doctor.registry import Finding, Findings, Message, Severity, check, describe

ENTRY = describe(
    __doc__,
    Message(r"was killed by SIGILL"),  # paralab's launcher
    silent=True,
)


@check("L10", source="machine")
def trial_died(facts: Facts) -> Findings:
    for name, probe in facts.precisions.items():
        if "SIGILL" not in probe.reason:
            continue
        severity: Severity = "warning" if facts.gpus else "error"
        settings = " ".join(f"{variable}={value}" for variable, value in probe.environment.items())
        why = f"{name} fails on this CPU: {probe.reason}. The CPU lists instructions (AMX) that this virtual machine does not allow."
        fix = f"Train in fp32 on this CPU, or use {name} on a GPU."
        if settings:
            fix = f"export {settings} before Python starts. We tried it, and it works."
        yield Finding("L10", severity, why, fix, evidence=facts.evidence(f"{name} on CPU"))
