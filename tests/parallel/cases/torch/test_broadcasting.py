"""Broadcasts of parameters and of optimizer states."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import nn

import adasum_hvd.torch as hvd

Pair = namedtuple("Pair", "first second")
EVERY_DTYPE = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex32", "complex64", "complex128"),
]


def same_everywhere(value: object) -> bool:
    return all(value == other for other in hvd.allgather_object(value))


def last() -> int:
    return hvd.size() - 1


def case_broadcast_every_dtype() -> None:
    bits = torch.arange(24, dtype=torch.uint8) % 2
    for name in EVERY_DTYPE:
        dtype = getattr(torch, name)
        pattern = bits if hvd.rank() == last() else torch.zeros_like(bits)
        tensors = {
            "flat": pattern.to(dtype),
            "table": pattern.to(dtype).view(4, 6).t(),
            "scalar": pattern.to(dtype)[1].clone(),
            "empty": pattern.to(dtype)[:0],
            "expanded": pattern.to(dtype)[:4, None].expand(4, 5),
            "every second": pattern.to(dtype)[1::2],
        }
        hvd.broadcast_parameters(tensors, last())
        expected = bits.to(torch.float32)
        got = {key: tensor.to(torch.float32) for key, tensor in tensors.items()}
        assert torch.equal(got["flat"], expected), name
        assert torch.equal(got["table"], expected.view(4, 6).t()), name
        assert got["scalar"] == 1, name
        assert torch.equal(got["expanded"], expected[:4, None].expand(4, 5)), name
        assert torch.equal(got["every second"], expected[1::2]), name


def case_broadcast_lazy_bits() -> None:
    """Conjugates and negatives are marks on other memory until somebody asks."""
    memory = torch.full((3,), complex(1 + hvd.rank(), 2))
    conjugate = memory.conj()
    hvd.broadcast_parameters([("conjugate", conjugate)], 0)
    assert torch.equal(memory, torch.full((3,), 1 + 2j))
    memory = torch.full((3,), complex(1, 2 + hvd.rank()))
    hvd.broadcast_parameters([("negative", memory.conj().imag)], 0)
    assert torch.equal(memory.imag, torch.full((3,), 2.0))
    with torch.inference_mode():
        inferred = torch.full((3,), float(hvd.rank()))
    hvd.broadcast_parameters([inferred], 0)
    assert torch.equal(inferred, torch.zeros(3))


def case_broadcast_iterables() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).bfloat16()
    model.register_buffer("causal", torch.ones(4, 4, dtype=torch.bool))
    for params in (
        lambda: model.named_parameters(),
        lambda: model.state_dict(),
        lambda: model.state_dict().items(),
        lambda: model.parameters(),
        lambda: tuple(model.parameters()),
        lambda: (*model.named_parameters(), *model.named_parameters()),  # names twice
        lambda: {0: model[0].weight, "1": model[0].bias},
        lambda: [],
    ):
        values = list(model.parameters())
        with torch.no_grad():
            for value in values:
                value.fill_(hvd.rank() + 1)
        listed = params()
        hvd.broadcast_parameters(listed, root_rank=last())
        if listed:
            assert torch.all(model[0].weight == hvd.size())
    before = model[0].weight._version
    hvd.broadcast_parameters(model.named_parameters(), 0)
    assert model[0].weight._version > before


def case_broadcast_refusals_have_names() -> None:
    """Also where one rank alone could see it."""
    lazy = nn.LazyLinear(3).weight
    sparse = torch.ones(3, 3).to_sparse()
    good = torch.ones(3)
    for bad, words in (
        (sparse, r"expected a dense tensor.*torch.sparse_coo"),
        (lazy, "expected a shape, but got a lazy tensor; run one forward pass first"),
        (torch.ones(3, device="meta"), "expected a dense tensor of values.*meta"),
        (None, "expected a tensor, but got NoneType"),
        (3.0, "expected a tensor, but got float"),
    ):
        for tensor in (bad, bad if hvd.rank() == last() else good):
            match = rf"broadcast_parameters: some\.buffer: {words}.*on rank {{}},"
            rank = hvd.allgather_object(tensor is bad).index(True)
            with pytest.raises(ValueError, match=match.format(rank)):
                hvd.broadcast_parameters({"some.buffer": tensor}, 0)
    for params in (3, good, "weights", nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="expected a state dict, or an iterable"):
            hvd.broadcast_parameters(params, 0)
    broken = ((str(each), 1 / each) for each in (0,))
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        hvd.broadcast_parameters(broken if hvd.rank() == last() else {"0": good}, 0)
    for root in (hvd.size(), -1, None):
        with pytest.raises(ValueError, match="broadcast_parameters: expected a root_r"):
            hvd.broadcast_parameters([good], root)
    if hvd.size() > 1:
        extra = {"b": good} if hvd.rank() == last() else {}
        with pytest.raises(
            ValueError, match="expected the same parameters in the same"
        ):
            hvd.broadcast_parameters({"a": good, **extra}, 0)
        mine = torch.ones(2 + (hvd.rank() == last()))
        with pytest.raises(ValueError, match=r"\('mask', \(2,\), 'torch.float32'\)"):
            hvd.broadcast_parameters({"mask": mine}, 0)


def case_broadcast_in_a_process_set() -> None:
    if hvd.size() > 2:
        pair = hvd.add_process_set([1, 2])
        mine = torch.full((3,), float(hvd.rank()))
        if pair.included():
            hvd.broadcast_parameters([mine], 2, process_set=pair)
            assert hvd.broadcast_object(hvd.rank(), 2, process_set=pair) == 2
            with pytest.raises(ValueError, match=r"expected a root_rank in \[1, 2\]"):
                hvd.broadcast_parameters([mine], 0, process_set=pair)
        assert mine[0] == (2.0 if pair.included() else hvd.rank())
        hvd.remove_process_set(pair)
    else:
        mine = torch.full((3,), float(hvd.rank()))
        hvd.broadcast_parameters([mine], 0, process_set=hvd.global_process_set)
        assert mine[0] == 0


def trained(make, dtype: torch.dtype):
    """Return an optimizer that has a state on the last rank only."""
    torch.manual_seed(hvd.rank())
    model = nn.Linear(3, 2).to(dtype)
    optimizer = make(model.parameters())
    if hvd.rank() == last():

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3, dtype=dtype)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


def case_broadcast_optimizer_state_of_every_kind() -> None:
    for make in (
        lambda p: torch.optim.Adam(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.LBFGS(p, 0.1),
        lambda p: torch.optim.NAdam(p, 0.1),  # loading casts a part of its state
    ):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            optimizer = trained(make, dtype)
            hvd.broadcast_optimizer_state(optimizer, last())
            state = optimizer.state_dict()["state"]
            assert state and same_everywhere(repr(state))
            tensors = [v for v in state[0].values() if isinstance(v, torch.Tensor)]
            assert any(t.dtype == dtype for t in tensors)


class Keeps(torch.optim.SGD):
    """Takes a state as it comes; torch's own loading makes nothing of namedtuples in it."""

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


def case_broadcast_optimizer_state_of_odd_parts() -> None:
    optimizer = trained(lambda p: Keeps(p, 0.1), torch.float32)
    group = optimizer.param_groups[0]
    group["pair"] = Pair(0, 0)
    if hvd.rank() == 0:
        shared = torch.tensor([1 + 2j])
        optimizer.state[group["params"][0]] = {
            "pair": Pair(torch.ones(2, dtype=torch.bool), 3),
            "ordered": OrderedDict(b=shared, a=[shared, (torch.ones(1), None)]),
            "rows": torch.eye(3).to_sparse(),
            "expanded": torch.ones(1).expand(3),
            "schedule": lambda step: step + 1,
        }
        group["pair"] = Pair(0.5, 0.75)
        optimizer.loaded = optimizer.state_dict()
    hvd.broadcast_optimizer_state(optimizer, 0)
    pair = optimizer.loaded["param_groups"][0]["pair"]
    assert type(pair) is Pair and pair == (0.5, 0.75)
    state = optimizer.loaded["state"][0]
    assert type(state["pair"]) is Pair and state["pair"].second == 3
    assert state["pair"].first.dtype == torch.bool and state["pair"].first.all()
    assert list(state["ordered"]) == ["b", "a"]
    assert state["ordered"]["a"][0] is state["ordered"]["b"]
    assert state["ordered"]["b"] == 1 + 2j
    assert state["schedule"](1) == 2
    assert torch.equal(state["rows"].to_dense(), torch.eye(3))
    assert torch.equal(state["expanded"], torch.ones(3))


class Unsaved(torch.optim.SGD):
    """Its state cannot be had."""

    def state_dict(self):
        raise RuntimeError("out of luck")


def case_broadcast_optimizer_state_fails_everywhere() -> None:
    model = nn.Linear(3, 2)
    optimizer = Unsaved(model.parameters(), 0.1)
    match = rf"RuntimeError: out of luck \(on rank {last()}"
    with pytest.raises(ValueError, match=match):
        hvd.broadcast_optimizer_state(optimizer, last())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if hvd.rank() == 0:
        optimizer.state[model.weight]["lock"] = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot pickle '_thread.lock'.*on rank 0,"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    if hvd.size() > 1:
        groups = [{"params": [p]} for p in model.parameters()]
        mine = groups if hvd.rank() == last() else model.parameters()
        optimizer = torch.optim.SGD(mine, 0.1)
        match = rf"different number of parameter groups.*on rank {last()},"
        with pytest.raises(ValueError, match=match):
            hvd.broadcast_optimizer_state(optimizer, 0)
    with pytest.raises(ValueError, match="broadcast_optimizer_state: expected a root_"):
        hvd.broadcast_optimizer_state(optimizer, hvd.size())
