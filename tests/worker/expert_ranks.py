"""Run this on two ranks: it tries to prove that experts can be divided, for many models and with
mistakes. Rank 0 prints the results as JSON.

    python -S tests/forked.py 2 tests/worker/expert_ranks.py
"""

import json

import torch
import torch.distributed as dist
from torch import nn

from paralab.worker.proofs.prove_experts import find_expert_plan
from paralab.worker.sharding.shards import is_split
from paralab.worker.sharding.split_experts import SplitExperts
from paralab.workload.hooks import patched
from paralab.workload.load import load_workload
from paralab.workload.workload import Workload
from tests.worker import expert_models

MODELS = ("even", "six", "one_expert", "one_rank", "flat", "dropout", "clipped", "adamw")
MODELS += ("three", "capacity", "balanced", "outside", "separate")


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = MixtralConfig(**sizes, **heads, use_cache=False, experts_implementation="eager")
    tokens = torch.arange(90).view(10, 9) % 32
    return Workload(
        lambda: MixtralForCausalLM(config),
        ({"input_ids": tokens[:, :-1]}, tokens[:, 1:].clone()),
        lambda out, target: nn.functional.cross_entropy(out.logits.flatten(0, 1), target.flatten()),
    )


init, exchange = SplitExperts.__init__, SplitExperts.exchange
plan_route = SplitExperts._plan_route


def init_with_averages(self, model, *more):
    """Average the gradients of experts, too."""
    init(self, model, *more)
    for parameter in filter(is_split, model.parameters()):
        parameter.register_hook(lambda grad: grad / 2)


def exchange_with(change):
    def exchange_wrongly(self, route, sent, unit):
        received = exchange(self, route, sent, unit)
        return change(received, unit)

    return {"exchange": exchange_wrongly}


def turn_results(received, unit):
    is_result = len(received) == 1 and unit == "activations"
    return (received[0].flip(0),) if is_result else received


def lose_last_result(received, unit):
    is_result = len(received) == 1 and unit == "activations"
    return (received[0] * (torch.arange(len(received[0])) > 0)[:, None],) if is_result else received


def lose_gradients_of_weights(received, unit):
    lost = len(received) == 2 and unit == "gradients"
    return (received[0], torch.zeros_like(received[1])) if lost else received


def send_to_other_ranks(self, layer, chosen, own):
    route = plan_route(self, layer, chosen, own)
    return route._replace(order=route.order.sort().values)


MISTAKES = {
    "experts averaged": {"__init__": init_with_averages},
    "other order": exchange_with(turn_results),
    "dropped": exchange_with(lose_last_result),
    "weights without gradient": exchange_with(lose_gradients_of_weights),
    "other ranks": {"_plan_route": send_to_other_ranks},
    "others not summed": {"sum_gradients": lambda self, begin: None},
}


def prove(workload):
    plan = find_expert_plan(workload, 2)
    torch.set_default_dtype(torch.float32)
    return {"divided": len(plan.kept), "problem": plan.problem}


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = {name: prove(getattr(expert_models, name)()) for name in MODELS}
    models["moe:tiny"] = prove(load_workload("moe:tiny"))
    models["mixtral"] = prove(mixtral())
    mistakes = {}
    for name, broken in MISTAKES.items():
        with patched(SplitExperts, **broken):
            mistakes[name] = prove(expert_models.even())["problem"]
    if dist.get_rank() == 0:
        print(json.dumps({"models": models, "mistakes": mistakes}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
