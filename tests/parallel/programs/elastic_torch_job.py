"""An elastic job of torch as tests start it: elastic_plan.py."""

from __future__ import annotations

import torch
from torch.nn import functional

import adasum_hvd.torch as hvd
from tests.parallel.programs.elastic_plan import BATCH, SAMPLES, Plan, digest

plan = Plan(hvd)
plan.arrive()
hvd.init()
torch.manual_seed(hvd.rank())  # the first synchronization makes replicas equal
features, labels = map(torch.from_numpy, plan.data())
model = torch.nn.Sequential(
    torch.nn.Linear(6, plan.hidden),
    torch.nn.Tanh(),
    torch.nn.Linear(plan.hidden, plan.hidden),
    torch.nn.Tanh(),
    torch.nn.Linear(plan.hidden, 3),
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.02, momentum=0.9),
    model.named_parameters(),
    **plan.options,
)
sampler = hvd.elastic.ElasticSampler(range(SAMPLES), shuffle=True)
# Ranks come with scales of their own; of the three reductions one goes without a scaler.
scaler = hvd.GradScaler(
    "cpu", 2.0 ** (5 + hvd.rank()), enabled=plan["op"] != "adasum-grad"
)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
objects = {"sampler": sampler, "scaler": scaler, "schedule": schedule}
state = hvd.elastic.TorchState(model, optimizer, **objects, epoch=0, step=0)


def weights() -> str:
    return digest(p.detach().numpy() for p in model.parameters())


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    plan.begin(state.step, weights())
    while state.epoch < plan["epochs"]:
        order = list(state.sampler)
        for position in range(0, len(order), BATCH):
            chosen = order[position : position + BATCH]
            plan.come_upon(state, state.step)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(features[chosen]), labels[chosen])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            state.schedule.step()
            state.sampler.record_batch(position // BATCH, len(chosen))
            plan.write(
                step=state.step, epoch=state.epoch, samples=chosen, weights=weights(),
                loss=loss.item(),
            )  # fmt: skip
            state.step += 1
            if state.step % plan["commit"] == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()
    plan.write(end=state.step, weights=weights())


train(state)
