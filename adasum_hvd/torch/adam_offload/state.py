"""What `AdamOffload` keeps on the host: moments, float32 masters, and how they are saved.

A state dict is that of torch's Adam, plus masters where there are any. On the way out every
parameter gets a "step" of its own, for torch's Adam reads it there and adds to it in place. On
the way in tensors are shielded from `Optimizer.load_state_dict`, which would move them to the
parameter's device and dtype.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from adasum_hvd.torch.adam_offload import settings
from adasum_hvd.torch.adam_offload.cuda import Transfers
from adasum_hvd.torch.adam_offload.host import PIECE_ELEMENTS, ranks_here, thread_budget

MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_ALL_GROUPS = ("_use_locking", "_num_threads")  # attributes that copies keep


def master_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's moments and master: float32, or its own float64."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def is_own_master(param: torch.Tensor) -> bool:
    """Return whether the host can update the parameter itself."""
    return (
        param.is_cpu
        and param.dtype in (torch.float32, torch.float64)
        and param.is_contiguous()
    )


# ---- bytes ----


@dataclass(frozen=True)
class Plan:
    """Bytes of an `AdamOffload` on one rank.

    Attributes:
        params: number of parameters' elements.
        moments: both moments, on the host.
        masters: float32 masters of parameters that are not their own, on the host.
        pinned: page-locked buffers for parameters on CUDA, on the host.
        scratch: on the host.
        theirs: the device bytes of the parameters on CUDA and of as many gradients, which are
            the model's.
        kept_on_device: what the optimizer keeps on devices between steps: always 0.
        available: host memory that is free now, shared by all ranks of the host.
    """

    params: int
    moments: int
    masters: int
    pinned: int
    scratch: int
    theirs: int
    available: int
    kept_on_device: int = 0

    @classmethod
    def of(cls, params: Iterable[torch.Tensor]) -> Plan:
        """Return what these parameters will need; allocates nothing."""
        sums = dict.fromkeys(("params", "moments", "masters", "pinned"), 0)
        for param in params:
            if not param.requires_grad:
                continue
            elements, master_bytes = param.numel(), master_dtype(param).itemsize
            sums["params"] += elements
            sums["moments"] += 2 * elements * master_bytes
            if not is_own_master(param):
                sums["masters"] += elements * master_bytes
            if param.is_cuda:
                sums["pinned"] += elements * param.element_size()
        # Scratch is two pieces of float32, where it is needed at all.
        return cls(
            **sums,
            scratch=2 * 4 * PIECE_ELEMENTS * thread_budget(),
            theirs=2 * sums["pinned"],
            available=psutil.virtual_memory().available,
        )

    @property
    def host(self) -> int:
        """All host bytes."""
        return self.moments + self.masters + self.pinned + self.scratch

    def __str__(self) -> str:
        def mib(nbytes: int) -> str:
            return f"{nbytes / 2**20:.1f} MiB"

        line = (
            f"AdamOffload: {self.params} elements; host {mib(self.host)} (moments "
            f"{mib(self.moments)}, masters {mib(self.masters)}, pinned {mib(self.pinned)}, "
            f"scratch {mib(self.scratch)}) of {mib(self.available)} available; device "
            f"{mib(self.kept_on_device)} kept between steps (parameters and gradients on CUDA: "
            f"{mib(self.theirs)})"
        )
        ranks = ranks_here()
        if self.host * ranks > self.available:
            line += (
                f"; WARNING: {ranks} ranks on this host need {mib(self.host * ranks)}, which is "
                "more than there is"
            )
        return line


# ---- masters ----


class HostStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is on the host; parameters are rounded from masters there."""

    _use_locking = False
    _num_threads: int | None = None

    def _begin(self) -> None:
        """Set up what is neither state nor settings, and is not copied."""
        self.lock = threading.RLock()
        self._transfers = Transfers()
        # By parameter with a master: (address, version) when the two agreed last.
        self._agreed: dict[torch.Tensor, tuple[int, int]] = {}
        self._publishing = True
        self._unpublished: set[torch.Tensor] = set()
        for group in self.param_groups:
            self._watch(group)

    def _watch(self, group: settings.Group) -> None:
        for param in group["params"]:
            if param.is_cuda:
                self._transfers.watch(param)

    def _guard(self) -> Any:
        return self.lock if self._use_locking else nullcontext()

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state, dtype = self.state[param], master_dtype(param)
        if "exp_avg" not in state:
            for key in MOMENTS:
                state[key] = torch.zeros(param.shape, dtype=dtype, device="cpu")
        elif state["exp_avg"].dtype != dtype:  # the model went to float64, or back
            state.update({key: value.to(dtype) for key, value in state.items()})
        if "master" not in state and not is_own_master(param):
            state["master"] = torch.empty(param.shape, dtype=dtype, device="cpu").copy_(
                param.detach()
            )
        return state

    @torch.no_grad()
    def master(self, param: torch.Tensor) -> torch.Tensor:
        """Return the host tensor that holds a parameter's weights: its master, or itself.

        Where the parameter differs from its rounded master, the master takes its value.
        """
        master = self._state_of(param).get("master")
        if master is None:
            return param
        if self._agreed.get(param) != (param.data_ptr(), param._version):
            here = param.detach().cpu()
            same = here == master.to(param.dtype)
            master.copy_(torch.where(same, master, here.to(master.dtype)))
            self._agree([param])
        return master

    def refresh_master(self) -> None:
        """Look for parameters that others have changed by ways that torch does not count."""
        self._agreed.clear()

    def _agree(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            self._agreed[param] = (param.data_ptr(), param._version)

    def adopt_master(self, param: torch.Tensor, home: torch.Tensor) -> None:
        """Keep a parameter's master in `home` from now on.

        Args:
            param: one that is not its own master.
            home: on the host, contiguous, of the master's shape and dtype; overwritten.
        """
        self.state[param]["master"] = home.copy_(self.master(param))

    def _updated(self, param: torch.Tensor) -> None:
        """Bring a new master back to its parameter, or remember to."""
        if not self._publishing:
            self._unpublished.add(param)
        elif param.is_cuda:
            self._transfers.send(param)
        else:
            if not param.is_contiguous():
                param.copy_(self.state[param]["master"])
            self._agree([param])

    # ---- weights that are not final yet: see optimizer/offload_delta.py ----

    def hold_back(self) -> None:
        """Let steps change masters only, until :meth:`publish`."""
        self._publishing = False

    @torch.no_grad()
    def publish(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        """Round masters into their parameters: those held back, and `parameters`."""
        self._publishing = True
        pending = {*self._unpublished, *parameters}
        self._unpublished.clear()
        for param in pending:
            master = self.state.get(param, {}).get("master")
            if master is None:
                continue
            if param.is_cuda:
                self._transfers.buffer(param).copy_(master)
                self._transfers.send(param)
            else:
                param.copy_(master)
        self._transfers.finish()
        self._agree(pending)

    # ---- state dicts and copies ----

    def state_dict(self) -> dict[str, Any]:
        """As torch's Adam's, plus the masters; on the host.

        `torch.optim.Adam` can load it; it then puts eps where torch does.
        """
        hook = self.register_state_dict_post_hook(_exported, prepend=True)
        try:
            with self._guard():
                return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load our own or torch's Adam's state; everything stays on the host.

        What torch's has no word for (Nesterov, loss_scale, torch_eps, schedules) stays as it
        is here.

        Raises:
            ValueError: the groups or shapes differ, or the state is of another algorithm
                (amsgrad, maximize, the other kind of weight decay).
        """
        hook = self.register_load_state_dict_pre_hook(_imported)
        try:
            with self._guard():
                super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, each master without the larger tensor that it may be part of."""
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in _OF_ALL_GROUPS},
            "state": {
                param: {key: _alone(value) for key, value in values.items()}
                for param, values in self.state.items()
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded or unpickled state, on the host."""
        old = self.__dict__.get("state", {})
        super().__setstate__(state)
        if "_transfers" not in self.__dict__:
            self._begin()
        for param in [p for p in {**old, **self.state} if isinstance(p, torch.Tensor)]:
            values = self.state.get(param, {})
            if values or "master" in old.get(param, {}):
                self.state[param] = _settled(param, old.get(param, {}), values)
        self._agreed.clear()


class _Shield:
    """A tensor that `Optimizer.load_state_dict` passes on as it is."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy where its memory is part of a larger piece."""
    return (
        tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    )


def _exported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return torch's state dict of an `AdamOffload` as one that torch's Adam can load.

    Schedules that are functions are part of the program, not of its state, and stay behind.
    """
    step = float(optimizer.param_groups[0]["step"])
    state = {
        place: {
            "step": torch.tensor(step, dtype=torch.float32, device="cpu"),
            **{key: _alone(value) for key, value in values.items()},
        }
        for place, values in state_dict["state"].items()
    }
    param_groups = [
        {k: v for k, v in group.items() if k != "schedule" or not callable(v)}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": param_groups}


def _imported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict, ours or torch's Adam's, ready for `Optimizer.load_state_dict`.

    Raises:
        ValueError: a setting that we lack, the state of another algorithm, or a moment of
            another shape than its parameter.
    """
    saved = [dict(group) for group in state_dict["param_groups"]]
    state = state_dict["state"]
    ours = optimizer.param_groups
    steps = {float(values["step"]) for values in state.values() if "step" in values}
    if len(steps) > 1:
        warnings.warn(
            f"AdamOffload: the saved state counts steps per parameter ({sorted(steps)}); there "
            f"is one count for all here, which is set to {max(steps):g}",
            stacklevel=4,
        )
    for group, own in zip(saved, ours, strict=False):
        settings.drop_foreign(group)
        _check_same_decay(group, own)
        # torch's Adam carries our groups' "step" along and does not count in it.
        group["step"] = int(max(steps, default=group.get("step", 0)))
        for key, value in own.items():
            if key != "params":
                group.setdefault(key, value)
    places = [place for group in saved for place in group["params"]]
    params = [param for group in ours for param in group["params"]]
    for place, param in zip(places, params, strict=False):
        _check_fits(place, state.get(place, {}), param)
    shielded = {
        place: {
            key: _Shield(value) if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        }
        for place, values in state.items()
    }
    return {**state_dict, "state": shielded, "param_groups": saved}


def _check_same_decay(saved: settings.Group, own: settings.Group) -> None:
    expected = own["decoupled_weight_decay"]
    actual = saved.get(
        "decoupled_weight_decay", expected
    )  # older torch does not save it
    if actual != expected:
        raise ValueError(
            f"AdamOffload.load_state_dict: decoupled_weight_decay: expected {expected}, but got "
            f"{actual} in the saved state; create AdamOffload with "
            f"decoupled_weight_decay={actual}"
        )


def _check_fits(place: int, values: dict[str, Any], param: torch.Tensor) -> None:
    if values and not set(MOMENTS) <= set(values):
        raise ValueError(
            f"AdamOffload.load_state_dict: parameter {place}: required {MOMENTS}, got "
            f"{sorted(values)}; was this saved from an Adam?"
        )
    for key in (*MOMENTS, "master"):
        value = values.get(key)
        if value is not None and value.shape != param.shape:
            raise ValueError(
                f"AdamOffload.load_state_dict: {key} of parameter {place}: required shape "
                f"{tuple(param.shape)}, got {tuple(value.shape)}; was this saved from "
                "another model?"
            )


def _settled(
    param: torch.Tensor, old: dict[str, torch.Tensor], values: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return one parameter's state on the host, in the tensors that it had before.

    A master must stay where it is, for others may hold views of it.

    Args:
        param: the parameter.
        old: its state until now, may be empty.
        values: its new state, shielded or not; what is missing starts anew.
    """
    new: dict[str, torch.Tensor] = {}
    needs_master = "master" in old or not is_own_master(param)
    for key in (*MOMENTS, "master") if needs_master else MOMENTS:
        value, home = values.get(key), old.get(key)
        if home is None and isinstance(value, torch.Tensor):
            new[key] = value  # unpickled or copied with us: ours already
            continue
        if home is None:
            home = torch.empty(param.shape, dtype=master_dtype(param), device="cpu")
        if value is None:
            value = param.detach() if key == "master" else home.zero_()
        new[key] = home.copy_(value.tensor if isinstance(value, _Shield) else value)
    return new
