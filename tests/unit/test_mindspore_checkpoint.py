"""MindSpore's checkpoints: files that MindSpore 2.10.0 wrote, both directions, damaged files.

`tests/integrations/mindspore_program.py write` made the files; `make integrations` checks them.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from adasum_hvd import cli, mindspore_checkpoint
from adasum_hvd.adam_offload import AdamOffload
from adasum_hvd.mindspore_checkpoint import (
    Entry,
    load,
    read,
    save,
    write,
)

FILES = Path(__file__).with_name("mindspore")
FIRST = FILES / "adam_offload-2.10.0.ckpt"
LATER = FILES / "adam_offload-2.10.0-later.ckpt"
STEPS = 5  # before each of the files
NAMES = {  # of MindSpore's parameters, in its order
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "bn.weight": "bn.gamma",
    "bn.bias": "bn.beta",
    "table.weight": "table.embedding_table",
}


class Net(nn.Module):
    """The network of mindspore_program.py."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.bn = nn.BatchNorm1d(4)
        self.table = nn.Embedding(5, 2)


def training() -> tuple[Net, AdamOffload]:
    model = Net()
    params = [(NAMES[name], p) for name, p in model.named_parameters()]
    # MindSpore's names, because those of beta and gamma are not decayed.
    return model, AdamOffload(params, 0.01, weight_decay=0.1, verbose=False)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for step in range(first, first + STEPS):
        for parameter in model.parameters():
            index = torch.arange(parameter.numel(), dtype=torch.float64) + step
            values = torch.cos(index).to(parameter.dtype)
            parameter.grad = values.reshape(parameter.shape)
        optimizer.step()


def check(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Check weights and state against a file of MindSpore."""
    entries = read(path)
    state = optimizer.state_dict()["state"]
    for place, (name, parameter) in enumerate(model.named_parameters()):
        assert int(state[place]["step"]) == entries["global_step"].array()
        for actual, expected in (
            (parameter, NAMES[name]),
            (state[place]["exp_avg"], f"moment1.{NAMES[name]}"),
            (state[place]["exp_avg_sq"], f"moment2.{NAMES[name]}"),
        ):
            np.testing.assert_allclose(
                actual.detach().numpy(), entries[expected].array(), atol=1e-6
            )


def test_the_entries_of_a_file():
    entries = read(FIRST)
    assert len(entries) == 26
    assert entries["fc.weight"][1:3] == ("Float32", (4, 3))
    assert entries["global_step"].array().tolist() == [5]
    assert entries["single"].shape == () and entries["single"].array() == 2.5
    assert entries["brain"].dtype == "BFloat16"
    assert entries["brain"].array().tolist() == [1.0, -2.5]
    assert entries["half"].array().dtype == np.float16
    assert str(entries["note"].array()) == "café"


def test_training_continues_as_in_mindspore():
    model, optimizer = training()
    rest = load(FIRST, model, optimizer)
    assert set(rest) == {
        *("learning_rate", "epoch_num", "note"),
        "single",
        "brain",
        "half",
    }
    check(model, optimizer, FIRST)
    moving = read(FIRST)["bn.moving_variance"].array()
    assert np.array_equal(model.bn.running_var.numpy(), moving)
    assert optimizer.param_groups[0]["lr"] == 0.01
    steps(model, optimizer, STEPS)
    check(model, optimizer, LATER)
    rates = [0.01 * (1 + step) for step in range(20)]
    scheduled = AdamOffload(model.parameters(), rates, verbose=False)
    steps(model, scheduled, 0)
    steps(model, scheduled, STEPS)
    load(FIRST, model, scheduled)  # back to the file's step
    steps(model, scheduled, STEPS)
    assert scheduled.param_groups[0]["lr"] == rates[2 * STEPS - 1]


def test_there_and_back(tmp_path: Path):
    path = tmp_path / "ours.ckpt"
    model, optimizer = training()
    load(FIRST, model, optimizer)
    save(path, model, optimizer)
    expected, ours = read(FIRST), read(path)
    only = set(expected) - set(ours)
    assert only == {*("learning_rate", "epoch_num", "note"), "single", "brain", "half"}
    for name, entry in ours.items():
        assert entry[:3] == expected[name][:3]
        if not name.endswith("_power"):
            assert bytes(entry.data) == bytes(expected[name].data), name
    again, second = training()
    assert load(path, again, second) == {}
    steps(again, second, STEPS)
    check(again, second, LATER)
    assert [p.name for p in tmp_path.iterdir()] == ["ours.ckpt"]  # no partial file


def test_a_file_is_written_as_by_mindspore(tmp_path: Path):
    write(tmp_path / "copy.ckpt", read(LATER).values())
    assert (tmp_path / "copy.ckpt").read_bytes() == LATER.read_bytes()


def test_torch_adam_and_a_fresh_optimizer(tmp_path: Path):
    model, _ = training()
    plain = torch.optim.Adam(model.parameters())
    load(FIRST, model, plain)
    check(model, plain, FIRST)
    plain.step()
    fresh, optimizer = training()
    save(tmp_path / "fresh.ckpt", fresh, optimizer)
    assert not optimizer.state_dict()["state"]  # saving makes no state
    entries = read(tmp_path / "fresh.ckpt")
    assert entries["global_step"].array() == 0 and entries["beta1_power"].array() == 1
    load(tmp_path / "fresh.ckpt", model, plain)
    assert plain.state_dict()["state"][0]["exp_avg"].abs().sum() == 0


def test_half_precision_keeps_masters(tmp_path: Path):
    model, optimizer = training()
    model.bfloat16()
    load(FIRST, model, optimizer)
    exact = torch.tensor(read(FIRST)["fc.weight"].array())
    assert torch.equal(model.fc.weight, exact.bfloat16())
    assert torch.equal(optimizer.master(model.fc.weight), exact)
    save(tmp_path / "ours.ckpt", model, optimizer)
    assert torch.equal(
        torch.tensor(read(tmp_path / "ours.ckpt")["fc.weight"].array()), exact
    )
    save(tmp_path / "alone.ckpt", model)
    entry = read(tmp_path / "alone.ckpt")["fc.weight"]
    assert entry.dtype == "BFloat16"
    assert np.array_equal(entry.array(), exact.bfloat16().float().numpy())


def test_names_ties_and_shapes(tmp_path: Path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 3)  # more than 127 bytes
            self.head = nn.Linear(3, 40, bias=False)
            self.head.weight = self.table.weight
            self.single = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.zeros(2, 0))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("count", torch.tensor(7))

    model, path = Tied(), tmp_path / "tied.ckpt"
    optimizer = AdamOffload(model.parameters(), verbose=False)
    (model.single + model.table.weight.sum()).backward()
    optimizer.step()
    names = {"single": "scale"}
    save(path, model, optimizer, names)
    entries = read(path)
    assert entries["scale"].shape == () and entries["flags"].dtype == "Bool"
    assert ("head.weight" in entries) + ("table.embedding_table" in entries) == 1
    other = Tied()
    load(path, other, AdamOffload(other.parameters(), verbose=False), names)
    assert torch.equal(other.head.weight, model.table.weight)
    assert other.single == model.single and other.count == 7
    for tied in ("head.weight", "table.weight"):
        save(path, model, names={tied: "shared"})
        assert set(read(path)) == {"single", "shared", "flags", "count"}
        load(path, other, names={tied: "shared"})
    save(path, model, optimizer, names)
    with pytest.raises(ValueError, match=r"expected single, but got .*names=\{'si"):
        load(path, other)
    with pytest.raises(
        ValueError, match=r"names in model\.state_dict\(\), but got \['x"
    ):
        load(path, other, names={"x": "scale"})
    with pytest.raises(ValueError, match="expected a name for each tensor, but got co"):
        save(path, model, names={"single": "count"})


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path):
    entries = read(FIRST)
    wrong = {
        "expected fc.bias, but got fc.weight": {"fc.bias": None},
        r"fc.bias: expected shape \(4,\)": {"fc.bias": entries["half"]},
        r"a dtype for torch.float32, but got \(4,\) of Int32": {
            "fc.bias": Entry("", "Int32", (4,), bytes(16))
        },
        r"fc\.bias: expected one of .* but got dtype 'Int4'": {
            "fc.bias": Entry("", "Int4", (4,), bytes(2))
        },
        "expected moment2.bn.beta, but got none": {"moment2.bn.beta": None},
        r"moment1.fc.bias: expected shape \(4,\)": {"moment1.fc.bias": entries["half"]},
        "expected global_step and moments of Adam": {"global_step": None},
    }
    model, optimizer = training()
    before = [p.detach().clone() for p in model.state_dict().values()]
    for match, changes in wrong.items():
        path = tmp_path / "wrong.ckpt"
        changed = {**entries, **changes}
        kept = [e._replace(name=n) for n, e in changed.items() if e is not None]
        write(path, kept)
        with pytest.raises(ValueError, match=match):
            load(path, model, optimizer)
        assert all(map(torch.equal, model.state_dict().values(), before))
        assert not optimizer.state_dict()["state"]
    load(FIRST, model)  # the model alone
    with pytest.raises(TypeError, match="expected an AdamOffload or torch"):
        load(FIRST, model, torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(TypeError, match="but got object; pass one, or a wrap cell"):
        load(FIRST, model, object())
    with pytest.raises(TypeError, match="without amsgrad, but got Adam"):
        load(FIRST, model, torch.optim.Adam(model.parameters(), amsgrad=True))
    with pytest.raises(TypeError, match="of the model's parameters, but got one with"):
        load(FIRST, model, training()[1])


def test_other_betas_and_counts_warn(tmp_path: Path):
    model, _ = training()
    optimizer = AdamOffload(model.parameters(), beta1=0.8, verbose=False)
    with pytest.warns(UserWarning, match="got 0.59049; create the optimizer") as caught:
        load(FIRST, model, optimizer)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(FIRST, *training())
    adam = torch.optim.Adam(model.parameters())
    for names in (("fc",), ("fc", "bn")):
        for name, parameter in model.named_parameters():
            parameter.grad = None
            if name.startswith(names):
                parameter.grad = torch.ones_like(parameter)
        adam.step()
    with pytest.warns(UserWarning, match=r"but got \[1, 2\]; MindSpore has one count"):
        save(tmp_path / "adam.ckpt", model, adam)


def test_cut_and_damaged_files(tmp_path: Path):
    """A file that is cut anywhere is an error, unless only whole entries are lost."""
    content, path = LATER.read_bytes(), tmp_path / "cut.ckpt"
    whole, entries = 0, [*read(LATER).values()]
    for size in range(1, len(content)):
        path.write_bytes(content[:size])
        try:
            found = read(path)
        except ValueError as error:
            assert "is cut or damaged; copy it again" in str(error)
            continue
        whole += 1
        assert [*found.values()] == entries[: len(found)]
        with pytest.raises(ValueError, match="expected"):
            load(path, *training())
    assert whole == len(entries) - 1
    content = FIRST.read_bytes()
    path.write_bytes(content[:200] + b"\x00" + content[201:])
    with pytest.raises(ValueError, match="a checksum that fits"):
        read(path)
    for other in (b"", b"PK\x03\x04 torch", b"\x80\x00\x00\x00{safetensors}", b"text"):
        path.write_bytes(other)
        with pytest.raises(ValueError, match="expected a file of save_checkpoint"):
            read(path)
    random = np.random.default_rng(0)
    for _ in range(300):  # nothing but the two errors
        damaged = bytearray(LATER.read_bytes())
        for place in random.integers(0, len(damaged), 3):
            damaged[place] = random.integers(0, 256)
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError, NotImplementedError):
            load(path, *training())


def message(number: int, content: bytes) -> bytes:
    """Return a field of fewer than 128 bytes."""
    return struct.pack("BB", number << 3 | 2, len(content)) + content


def test_parts_older_scalars_and_hash_tables(tmp_path: Path):
    def part(name: bytes, dims: bytes, data: bytes, kind: bytes = b"Float32") -> bytes:
        tensor = dims + message(2, kind) + message(3, data)
        return message(1, message(1, name) + message(2, tensor))

    path = tmp_path / "made.ckpt"
    values = np.arange(4, dtype=np.float32).tobytes()
    two = b"\x08\x02\x08\x02"
    content = part(b"w", two, values[:8]) + part(b"w", two, values[8:])
    content += part(b"old", b"\x08\x00", values[:4])  # a 0-d tensor before 2.10
    crc = b"crc_num" + zlib.crc32(content).to_bytes(10, "big")
    path.write_bytes(content + crc)
    assert read(path)["w"].array().tolist() == [[0, 1], [2, 3]]
    assert read(path)["old"].shape == ()
    for rest, match in (
        (part(b"v", two, values[:8]), r"16 bytes of Float32 for v \(2, 2\), but got 8"),
        (part(b"w", b"\x08\x04", values), "parts of different shapes"),
        (b"\x0d\x00", "expected whole entries, but got other bytes: the file is cut"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "cut or damaged"),
        (message(1, message(1, b"\xff")), "cut or damaged"),
    ):
        path.write_bytes(content + rest)
        with pytest.raises(ValueError, match=match):
            read(path)
    path.write_bytes(message(1, message(1, b"table") + message(3, b"")))
    with pytest.raises(
        NotImplementedError, match="table: expected a tensor, but got a h"
    ):
        read(path)
    path.write_bytes(part(b"w", b"\x08\x01", b"1", b"HiFloat8"))
    with pytest.raises(ValueError, match=r"w: .* but got dtype 'HiFloat8'; convert"):
        read(path)["w"].array()


def test_other_names_and_dtypes(tmp_path: Path):
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = mindspore_checkpoint.nonsense
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(NotImplementedError, match=r"0: .* but got torch\.complex64"):
        save(tmp_path / "complex.ckpt", model)
    assert not [*tmp_path.iterdir()]


# ---- adasum-hvd mindspore-checkpoint ----


def command(*words: object) -> int:
    return cli.main(["mindspore-checkpoint", *map(str, words)])


def test_the_command_lists(capsys: pytest.CaptureFixture):
    assert command(FIRST) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fc.weight Float32 [4, 3]" and len(lines) == 26
    assert "single Float32 []" in lines and "brain BFloat16 [2]" in lines


def test_the_command_converts_there_and_back(tmp_path: Path):
    there, back = tmp_path / "adam.pt", tmp_path / "adam.ckpt"
    model = ("--model", f"{__name__}:Net")
    assert command(FIRST, there, *model) == 0
    net, optimizer = training()
    saved = torch.load(there, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["weight_decay"] == 0.1  # its own settings
    steps(net, optimizer, STEPS)
    check(net, optimizer, LATER)
    assert command(there, back, *model) == 0
    expected = read(FIRST)
    for name, entry in read(back).items():
        np.testing.assert_allclose(entry.array(), expected[name].array(), rtol=1e-6)
    torch.save({"model": Net().state_dict()}, there)
    assert command(there, back, *model) == 0
    of_model = {name for name in expected if name.startswith(("fc", "bn", "table"))}
    assert set(read(back)) == of_model
    assert command(back, there, *model) == 0
    assert [*torch.load(there, weights_only=True)] == ["model"]


def test_the_command_names_the_mistake(tmp_path: Path, capsys: pytest.CaptureFixture):
    there = tmp_path / "adam.pt"
    torch.save([1], tmp_path / "list.pt")
    for words, match in (
        ((tmp_path / "none.ckpt",), "No such file"),
        ((FIRST, tmp_path / "two.ckpt"), "expected one file that ends in .ckpt"),
        ((FIRST, there), "--model: expected MODULE:FUNCTION, but got None"),
        ((FIRST, there, "--model", "nonsense:f"), "No module named 'nonsense'"),
        ((FIRST, there, "--model", f"{__name__}:nonsense"), "no attribute 'nonsense'"),
        ((FIRST, there, "--model", "torch.nn:Identity"), "empty parameter list"),
        ((FIRST, there, "--model", f"{__name__}:Other"), "expected w, but got fc.weight"),
        ((LATER, there, "--model", f"{__name__}:Wide"), "expected shape"),
        ((tmp_path / "list.pt", tmp_path / "x.ckpt", "--model", f"{__name__}:Net"),
         'expected a dict with "model", but got'),
    ):  # fmt: skip
        assert command(*words) == 1
        assert match in capsys.readouterr().err, words
    assert not there.exists()


def Other() -> nn.Module:
    return nn.ParameterDict({"w": torch.zeros(2)})


def Wide() -> nn.Module:
    model = Net()
    model.fc = nn.Linear(4, 4)
    return model
