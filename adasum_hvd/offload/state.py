"""The state of `AdamOffload` on the host: moments, float32 masters, and their state dicts.

A state dict is that of torch's Adam, plus masters if there are any.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from adasum_hvd.offload import settings
from adasum_hvd.offload.cuda import Transfers
from adasum_hvd.offload.host import HostAdam
from adasum_hvd.offload.plan import is_own_master, master_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is on the host; parameters are rounded from masters."""

    _use_locking = False
    _num_threads: int | None = None

    def _begin(self) -> None:
        """Set up the attributes that are neither state nor settings and are not copied."""
        self.lock = threading.RLock()
        self._host, self._transfers = HostAdam(), Transfers()
        # By parameter with a master: (address, version) when they were last equal.
        self._agreed: dict[torch.Tensor, tuple[int, int]] = {}
        self._publishing = True
        self._unpublished: set[torch.Tensor] = set()
        self.register_state_dict_post_hook(_exported)
        for param in self._params():
            self._transfers.watch(param)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _guard(self) -> Any:
        return self.lock if self._use_locking else nullcontext()

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parameter's state, with all tensors that it needs, in their dtype."""
        state, dtype = self.state.setdefault(param, {}), master_dtype(param)
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for key in MOMENTS:
                state[key] = torch.zeros(param.shape, dtype=dtype, device="cpu")
        elif state["exp_avg"].dtype != dtype:  # the model went to float64, or back
            state.update({k: v.to(dtype) for k, v in state.items() if k != "step"})
        if "master" not in state and not is_own_master(param):
            master = torch.empty(param.shape, dtype=dtype, device="cpu")
            state["master"] = master.copy_(param.detach())
        return state

    @torch.no_grad()
    def master(self, param: torch.Tensor) -> torch.Tensor:
        """Return the host tensor of a parameter's weights: its master, or itself.

        Elements that differ from the rounded master are copied to the master first.
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
        """Look for changes of parameters that torch's version counters do not show."""
        self._agreed.clear()

    def _agree(self, params: Iterable[torch.Tensor]) -> None:
        for param in params:
            self._agreed[param] = (param.data_ptr(), param._version)

    def _updated(self, param: torch.Tensor) -> None:
        """Write a new master to its parameter, or note it for :meth:`publish`."""
        if not self._publishing:
            self._unpublished.add(param)
        elif param.is_cuda:
            self._transfers.send(param)
        else:
            if not param.is_contiguous():
                param.copy_(self.state[param]["master"])
            self._agree([param])

    # ---- delayed writing of parameters: see optimizer/offload_delta.py ----

    def hold_back(self) -> None:
        """Let steps change only masters until :meth:`publish`."""
        self._publishing = False

    @torch.no_grad()
    def publish(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        """Write masters to their parameters: those held back, and `parameters`."""
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `AdamOffload` or torch's Adam: docs/adam_offload.md, State dicts.

        Raises:
            ValueError: the groups or shapes differ, or the state is of another algorithm.
        """
        hook = self.register_load_state_dict_pre_hook(_imported)
        try:
            with self._guard():
                super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state, and the arguments that are not in the groups."""
        own = {"_use_locking": self._use_locking, "_num_threads": self._num_threads}
        return {**super().__getstate__(), **own}

    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set loaded or unpickled state, in the old tensors, which buckets may hold."""
        old = self.__dict__.get("state", {})
        super().__setstate__(state)
        if "_transfers" not in self.__dict__:
            self._begin()
        for group in self.param_groups:
            for param in group["params"]:
                self._set_state(param, old.get(param, {}), group["step"])
        self._agreed.clear()

    def _set_state(self, param: torch.Tensor, home: dict[str, Any], steps: int) -> None:
        values = self.state.get(param, {})
        values = values() if callable(values) else values  # see _imported
        if not values and "master" not in home:
            self.state.pop(param, None)
            return
        self.state[param] = home
        state = self._state_of(param)
        # An optimizer pickled by 0.3 has the count in its groups only.
        state["step"].fill_(float(values.get("step", steps if values else 0)))
        for key in MOMENTS:
            state[key].copy_(values[key]) if values else state[key].zero_()
        if "master" in state:
            state["master"].copy_(values.get("master", param.detach()))


def _exported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert torch's state dict of an `AdamOffload` so that torch's Adam can load it.

    Schedules that are functions are omitted: they are part of the program, not of its state.
    """
    groups = state_dict["param_groups"]
    saved = [{k: v for k, v in group.items() if not callable(v)} for group in groups]
    state, params = dict(state_dict["state"]), optimizer._params()
    for place in [place for place in state if not params[place].is_contiguous()]:
        # torch's fused kernel reads elements in the order of memory, the parameter's.
        like, held = params[place], state[place]
        same = {k: torch.empty_like(like, dtype=held[k].dtype, device="cpu").copy_(held[k])
                for k in held.keys() - {"step"}}  # fmt: skip
        state[place] = {**held, **same}
    return {**state_dict, "state": state, "param_groups": saved}


def _imported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state dict of `AdamOffload` or torch's Adam for `Optimizer.load_state_dict`.

    That would move tensors to the parameter's device and dtype, but leaves functions alone.
    """
    state = state_dict["state"]
    steps = [float(values["step"]) for values in state.values() if "step" in values]
    groups = []
    saved = state_dict["param_groups"]
    for written, own in zip(saved, optimizer.param_groups, strict=False):
        group = {key: value for key, value in written.items() if key != "order"}
        settings.drop_foreign(group)
        expected = own["decoupled_weight_decay"]
        # Releases of torch before 2.7 do not save it.
        if (actual := group.get("decoupled_weight_decay", expected)) != expected:
            raise ValueError(
                f"AdamOffload.load_state_dict: decoupled_weight_decay: expected {expected}, but "
                f"got {actual} in the saved state; create AdamOffload with "
                f"decoupled_weight_decay={actual}"
            )
        # torch's Adam keeps our groups' "step", but does not increment it.
        step = int(max([group.get("step", 0), *steps]))
        # Functions are part of the program: a state without one does not turn them off.
        functions = {key: value for key, value in own.items() if callable(value)}
        groups.append({**own, **group, **functions, "step": step})
    places = [place for group in groups for place in group["params"]]
    params = dict(zip(places, optimizer._params(), strict=False))
    hidden = {}
    for place in [place for place in state if place in params]:
        values = state[place]
        _check_fits(place, values, params[place])
        hidden[place] = lambda values=values: values
    groups += saved[len(groups) :]  # torch reports their number
    return {**state_dict, "state": hidden, "param_groups": groups}


def _check_fits(place: int, values: dict[str, Any], param: torch.Tensor) -> None:
    if values and not set(MOMENTS) <= set(values):
        raise ValueError(
            f"AdamOffload.load_state_dict: parameter {place}: expected {MOMENTS}, but got "
            f"{sorted(values)}; was this saved from an Adam?"
        )
    for key in (*MOMENTS, "master"):
        value = values.get(key, param)
        if value.shape != param.shape:
            raise ValueError(
                f"AdamOffload.load_state_dict: {key} of parameter {place}: expected shape "
                f"{tuple(param.shape)}, but got {tuple(value.shape)}; was this saved from "
                "another model?"
            )
