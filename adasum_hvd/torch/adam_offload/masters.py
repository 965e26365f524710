"""Weights on the host and parameters anywhere: which holds what, and when they agree."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from adasum_hvd.torch.adam_offload.cuda import Transfers
from adasum_hvd.torch.adam_offload.plan import is_own_master, master_dtype
from adasum_hvd.torch.adam_offload.state import MOMENTS


class MasterOptimizer(torch.optim.Optimizer):
    """An optimizer that updates masters in host memory, from which parameters are rounded."""

    def _begin_masters(self) -> None:
        self._transfers = Transfers()
        # By parameter with a master: (address, version) when the two agreed last.
        self._agreed: dict[torch.Tensor, tuple[int, int]] = {}
        self._publishing = True
        self._unpublished: set[torch.Tensor] = set()

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
            self._agree(param)
        return master

    def refresh_master(self) -> None:
        """Look for parameters that others have changed by ways that torch does not count."""
        self._agreed.clear()

    def _agree(self, param: torch.Tensor) -> None:
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
            self._agree(param)

    # ---- weights that are not final yet: see delta.py ----

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
        for param in pending:
            self._agree(param)
