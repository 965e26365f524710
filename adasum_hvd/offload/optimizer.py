"""`AdamOffload`: Adam with its moments and float32 master weights on the host.

The formula and its arguments are in `adam.py`. A step runs through these files:

    gradients arrive (cuda.py) -> arithmetic (host.py) -> parameters return (cuda.py)

`settings.py` has arguments and param groups. `state.py` has the state between steps (moments and
masters) and its state dicts, `plan.py` their bytes, `cores.py` the threads of a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch

from adasum_hvd.base.frames import is_making_state
from adasum_hvd.base.logging import logger
from adasum_hvd.base.options import check_count
from adasum_hvd.offload import adam, settings
from adasum_hvd.offload.cores import hint_of_threads, thread_budget, threads
from adasum_hvd.offload.host import Settings, Update
from adasum_hvd.offload.plan import Plan, master_dtype
from adasum_hvd.offload.settings import Group
from adasum_hvd.offload.state import HostStateOptimizer

Item = tuple[int, int, torch.Tensor]  # number of the group, place in it, parameter


class AdamOffload(HostStateOptimizer):
    """Adam on the host, for parameters on CUDA devices or the CPU.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)

    with `g = (gradient + loss_scale * weight_decay * w) / loss_scale`; with decoupled weight
    decay `g = gradient / loss_scale`, after `w = (1 - lr weight_decay) w`. All of it is float32
    (float64 for float64 parameters) in host memory: docs/adam_offload.md, Masters.

    docs/adam_offload.md, Arguments, has more about them.

    Args:
        params: parameters, (name, parameter) pairs, or param groups; {"order_params": [...]} gives
            an order, through which updates go backwards.
        lr: a number or a 0-d tensor; a 1-d tensor or finite iterable with a rate per step; or
            a schedule, called with the step counted from 0.
        beta1: decay rate of the first moment, a float in (0, 1).
        beta2: decay rate of the second moment, a float in (0, 1).
        eps: a float > 0, added to the square root of v.
        use_locking: hold :attr:`lock` while weights and state change.
        use_nesterov: use `beta1 m + (1 - beta1) g` instead of m.
        weight_decay: L2 penalty >= 0, or the decoupled decay; or a schedule, as of `lr`.
        loss_scale: factor of the loss, > 0.
        learning_rate: MindSpore's name of `lr`, which it overrides.
        betas: torch's name of (beta1, beta2), which it overrides.
        named_parameters: (name, parameter) pairs that name every parameter, for `weight_decay`.
        torch_eps: add eps to the bias-corrected root, as `torch.optim.Adam` does.
        decoupled_weight_decay: decay the weights directly and not through gradients.
        num_threads: of this rank's step; by default its share of the launcher's cores.
        verbose: log :meth:`plan` on rank 0, at INFO.
        **foreign: arguments of other Adams (amsgrad, use_lazy, use_offload, ...), accepted if
            they ask for this algorithm.

    Raises:
        TypeError: an unknown argument or one of a wrong type, or elements of `params` that are
            not all parameters, or not all dicts.
        ValueError: an argument out of range or of another algorithm, no parameters, or a wrong
            `order_params`.
        KeyError: an unknown key in a group.
        RuntimeError: a parameter given twice.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = AdamOffload(model.parameters(), lr=0.01, verbose=False)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()

    References:
        docs/adam_offload.md; docs/mindspore.md.
    """

    # GradScaler then passes its scale, so that float16 gradients are unscaled in float32.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: float = 0.0,
        loss_scale: float = 1.0,
        *,
        learning_rate: Any = None,
        betas: tuple[float, float] | None = None,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        torch_eps: bool = False,
        decoupled_weight_decay: bool = False,
        num_threads: int | None = None,
        verbose: bool = True,
        **foreign: Any,
    ):
        adam.drop_foreign(foreign)
        if foreign:
            raise TypeError(f"AdamOffload: unexpected arguments {sorted(foreign)}")
        defaults = settings.checked(
            {
                "lr": lr if learning_rate is None else learning_rate,
                "betas": (beta1, beta2) if betas is None else betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "loss_scale": loss_scale,
                "use_nesterov": use_nesterov,
                "torch_eps": torch_eps,
                "decoupled_weight_decay": decoupled_weight_decay,
                "step": 0,
            }
        )
        if num_threads is not None:
            check_count("AdamOffload: num_threads", num_threads)
        # They apply to the whole optimizer, so the groups do not have them.
        self._use_locking = adam.check("use_locking", use_locking)
        self._num_threads = num_threads
        groups = settings.groups_of(params, defaults, named_parameters)
        super().__init__(groups, defaults)
        self._begin()
        # With Horovod only rank 0 logs anyway: see `base/logging.py`.
        rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
        if adam.check("verbose", verbose) and rank == "0":
            logger.info("%s", self.plan())
            if num_threads is None and hint_of_threads():
                logger.info("%s", hint_of_threads())

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does; its schedules go on with the step of the others.

        Raises as the constructor.
        """
        if not isinstance(param_group, dict):
            raise TypeError(
                f"AdamOffload: param_group: expected a dict, but got {type(param_group).__name__}"
            )
        param_group, _ = settings.complete(param_group, self.defaults)
        if self.param_groups:
            param_group["step"] = self.param_groups[0]["step"]
            if "order" in self.param_groups[0]:
                start, count = len(self._params()), len(param_group["params"])
                param_group.setdefault("order", list(range(start, start + count)))
        super().add_param_group(param_group)
        if "_transfers" in self.__dict__:
            for param in param_group["params"]:
                self._transfers.watch(param)

    # ---- memory and order ----

    def plan(self) -> Plan:
        """Return the bytes that training needs on host and device."""
        return Plan.of(self._params())

    def update_order(self) -> list[torch.Tensor]:
        """Return the parameters in the order in which a step updates them."""
        return [param for _, _, param in self._ordered()]

    def _ordered(self) -> list[Item]:
        listed = [
            (number, index, param)
            for number, group in enumerate(self.param_groups)
            for index, param in enumerate(group["params"])
        ]
        if "order" in self.param_groups[0]:
            listed.sort(key=lambda item: self.param_groups[item[0]]["order"][item[1]])
        return listed[::-1]

    # ---- the step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return after the last one was written.

        Returns:
            The loss of `closure`, which evaluates the model again, or None.

        Raises:
            RuntimeError: a gradient is sparse; nothing has changed.
            IndexError: a vector of learning rates has no value for this step; as above.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch's scaler adds `found_inf` up over the gradients: the int 0 if there are none.
        if float(getattr(self, "found_inf", None) or 0):
            return loss
        with self._guard():
            work = [item for item in self._ordered() if item[2].grad is not None]
            if not self.state and is_making_state():
                for _, _, param in work:
                    self._state_of(param)
            else:
                self._take_step(work)
        return loss

    def _take_step(self, work: list[Item]) -> None:
        if any(param.grad.is_sparse for _, _, param in work):
            raise RuntimeError(
                "AdamOffload: expected dense gradients, but got a sparse one; use sparse=False"
            )
        self._follow_schedules()
        on_cuda = [param for _, _, param in work if param.is_cuda]
        grad_scale = getattr(self, "grad_scale", None)
        # A scaler that passes no scale (it may be None) has unscaled in place.
        unscaled = hasattr(self, "found_inf") and grad_scale is None
        self._transfers.collect(on_cuda, unscaled)
        scale = 1.0 if grad_scale is None else float(grad_scale)
        with threads(self._num_threads or thread_budget()):
            for of_all, params in self._runs(work, scale):
                updates = map(self._update_of, params)
                self._host.run(of_all, updates, self._updated, bool(on_cuda))
        self._transfers.finish()
        self._agree(on_cuda)
        for group in self.param_groups:
            group["step"] += 1

    def _follow_schedules(self) -> None:
        """Set every group's values of this step; if a schedule raises, change no group."""
        values = [
            {
                key: adam.value_at(key, group[name], group["step"])
                for key, name in settings.SCHEDULES.items()
                if group.get(name) is not None
            }
            for group in self.param_groups
        ]
        for group, found in zip(self.param_groups, values, strict=True):
            group.update(found)

    def _runs(
        self, work: list[Item], grad_scale: float
    ) -> Iterator[tuple[Settings, Iterator[torch.Tensor]]]:
        """Count the step of each parameter; yield those in a row that share settings."""
        if not work:
            return
        counts = [self._state_of(param)["step"] for _, _, param in work]
        # A number instead of this tensor would take four times as long.
        one = torch.ones((), dtype=torch.float32, device="cpu")
        torch._foreach_add_(counts, one, alpha=1.0)
        steps = torch.stack(counts).tolist()

        def shared(item: tuple[Item, float]) -> tuple[Any, ...]:
            (number, index, param), step = item
            undecayed = self.param_groups[number].get("no_decay")
            decays = not (undecayed and undecayed[index])
            # A gradient travels from a device in the dtype of its parameter.
            arrives_as = param.dtype if param.is_cuda else param.grad.dtype
            return number, decays, step, arrives_as, master_dtype(param)

        for key, run in groupby(zip(work, steps, strict=True), shared):
            number, decays, step, *dtypes = key
            group = self.param_groups[number]
            of_all = Settings(
                group=group,
                decay=group["weight_decay"] if decays else 0.0,
                step=step,
                scale=group["loss_scale"] * grad_scale,
                converts=dtypes[0] != dtypes[1],
            )
            yield of_all, (param for (_, _, param), _ in run)

    def _update_of(self, param: torch.Tensor) -> Update:
        state = self.state[param]
        moments = state["exp_avg"], state["exp_avg_sq"]
        if "master" not in state:
            return Update(param, param.grad.contiguous(), *moments)
        weights, out = self.master(param), None
        if param.is_cuda:
            grad = self._transfers.gradient(param)
            out = grad if self._publishing else None
        else:
            grad = param.grad.contiguous()
            if self._publishing and param.is_contiguous():
                out = param
        return Update(weights, grad, *moments, out, param)
