"""The state of `AdamOffload` on the host: moments, float32 masters, and their state dicts.

A state dict is that of torch's Adam, plus masters if there are any. Loading shields tensors from
`Optimizer.load_state_dict`, which would move them to the parameter's device and dtype.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from adasum_hvd.offload import settings
from adasum_hvd.offload.cuda import Transfers
from adasum_hvd.offload.plan import is_own_master, master_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_ALL_GROUPS = ("_use_locking", "_num_threads")  # attributes that copies keep


class HostStateOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is on the host; parameters are rounded from masters."""

    _use_locking = False
    _num_threads: int | None = None

    def _begin(self) -> None:
        """Set up the attributes that are neither state nor settings and are not copied."""
        self.lock = threading.RLock()
        self._transfers = Transfers()
        # By parameter with a master: (address, version) when they were last equal.
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
            state["step"] = _count(0)
            for key in MOMENTS:
                state[key] = torch.zeros(param.shape, dtype=dtype, device="cpu")
        elif state["exp_avg"].dtype != dtype:  # the model went to float64, or back
            state.update({k: v.to(dtype) for k, v in state.items() if k != "step"})
        if "master" not in state and not is_own_master(param):
            state["master"] = torch.empty(param.shape, dtype=dtype, device="cpu").copy_(
                param.detach()
            )
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

    def adopt_master(self, param: torch.Tensor, home: torch.Tensor) -> None:
        """Move a parameter's master to `home`.

        Args:
            param: a parameter that has a master.
            home: overwritten; on the host, contiguous, of the master's shape and dtype.
        """
        self.state[param]["master"] = home.copy_(self.master(param))

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

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of torch's Adam, plus the masters; on the host.

        `torch.optim.Adam` can load it, and then uses its own place of eps.
        """
        hook = self.register_state_dict_post_hook(_exported, prepend=True)
        try:
            with self._guard():
                return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of `AdamOffload` or torch's Adam; the state stays on the host.

        Settings that torch's does not have (Nesterov, loss_scale, torch_eps, schedules) do not
        change.

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
        """Return torch's state, with a copy of each master that is part of a larger tensor."""
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in _OF_ALL_GROUPS},
            "state": {
                param: {key: _alone(value) for key, value in values.items()}
                for param, values in self.state.items()
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set loaded or unpickled state, on the host."""
        old = self.__dict__.get("state", {})
        super().__setstate__(state)
        if "_transfers" not in self.__dict__:
            self._begin()
        for group in self.param_groups:
            for param in group["params"]:
                values = self.state.get(param, {})
                if (
                    values
                ):  # an optimizer pickled by 0.3 has the count in its groups only
                    values = {"step": group["step"], **values}
                if values or "master" in old.get(param, {}):
                    self.state[param] = _settled(param, old.get(param, {}), values)
        self._agreed.clear()


class _Shield:
    """A tensor that `Optimizer.load_state_dict` does not change."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if it is part of a larger allocation."""
    return (
        tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
    )


def _exported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert torch's state dict of an `AdamOffload` so that torch's Adam can load it.

    It omits schedules that are functions: they are part of the program, not of its state.
    """
    state = {
        place: {key: _alone(value) for key, value in values.items()}
        for place, values in state_dict["state"].items()
    }
    param_groups = [
        {key: value for key, value in group.items() if not callable(value)}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "state": state, "param_groups": param_groups}


def _imported(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert a state dict of `AdamOffload` or torch's Adam for `Optimizer.load_state_dict`.

    Raises:
        ValueError: a setting or the state is of another algorithm, or a moment has another
            shape than its parameter.
    """
    saved = [dict(group) for group in state_dict["param_groups"]]
    state = state_dict["state"]
    ours = optimizer.param_groups
    steps = [float(values["step"]) for values in state.values() if "step" in values]
    for group, own in zip(saved, ours, strict=False):
        settings.drop_foreign(group)
        group.pop("order", None)  # gradients come in the order of this program
        _check_same_decay(group, own)
        # torch's Adam keeps our groups' "step", but does not increment it.
        group["step"] = int(max([group.get("step", 0), *steps]))
        for key, value in own.items():
            if key != "params":
                group.setdefault(key, value)
    places = [place for group in saved for place in group["params"]]
    params = [param for group in ours for param in group["params"]]
    for place, param in zip(places, params, strict=False):
        _check_fits(place, state.get(place, {}), param)
    shielded = {
        place: {
            key: _Shield(value) if torch.is_tensor(value) else value
            for key, value in values.items()
        }
        for place, values in state.items()
    }
    return {**state_dict, "state": shielded, "param_groups": saved}


def _check_same_decay(saved: settings.Group, own: settings.Group) -> None:
    expected = own["decoupled_weight_decay"]
    # Releases of torch before 2.7 do not save it.
    actual = saved.get("decoupled_weight_decay", expected)
    if actual != expected:
        raise ValueError(
            f"AdamOffload.load_state_dict: decoupled_weight_decay: expected {expected}, but got "
            f"{actual} in the saved state; create AdamOffload with "
            f"decoupled_weight_decay={actual}"
        )


def _check_fits(place: int, values: dict[str, Any], param: torch.Tensor) -> None:
    if values and not set(MOMENTS) <= set(values):
        raise ValueError(
            f"AdamOffload.load_state_dict: parameter {place}: expected {MOMENTS}, but got "
            f"{sorted(values)}; was this saved from an Adam?"
        )
    for key in (*MOMENTS, "master"):
        value = values.get(key)
        if value is not None and value.shape != param.shape:
            raise ValueError(
                f"AdamOffload.load_state_dict: {key} of parameter {place}: expected shape "
                f"{tuple(param.shape)}, but got {tuple(value.shape)}; was this saved from "
                "another model?"
            )


def _count(steps: Any) -> torch.Tensor:
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def _settled(
    param: torch.Tensor, old: dict[str, torch.Tensor], values: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return a parameter's new state on the host, in the tensors of its old state, if any.

    A master must keep its memory, because buckets may have views of it. Missing tensors are
    initialized.
    """
    steps = values.get("step", 0)
    steps = steps.tensor if isinstance(steps, _Shield) else steps
    new = {"step": _count(steps)}
    needs_master = "master" in old or not is_own_master(param)
    for key in (*MOMENTS, "master") if needs_master else MOMENTS:
        value, home = values.get(key), old.get(key)
        if home is None and isinstance(value, torch.Tensor):
            new[key] = value  # unpickled or copied with this optimizer
            continue
        if home is None:
            home = torch.empty(param.shape, dtype=master_dtype(param), device="cpu")
        if value is None:
            value = param.detach() if key == "master" else home.zero_()
        new[key] = home.copy_(value.tensor if isinstance(value, _Shield) else value)
    return new
