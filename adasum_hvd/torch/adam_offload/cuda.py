"""`AdamOffload` on CUDA: gradients to the host during backward, parameters back in `step()`.

One pinned host buffer per parameter, in its dtype, serves both ways: the gradient arrives in
it, and once that is used up, the new weights leave from it. Each device has a stream down and
a stream up, so both directions and the host's arithmetic overlap.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch

# After so many steps in a row with outdated early copies there are no more.
_STALE_STEPS = 2


def pinned(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized page-locked host tensor of `like`'s shape and dtype.

    torch's own pinned memory is rounded up to a power of two; this is exact to the page.
    """
    elements = like.numel()
    if elements == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    nbytes = elements * like.element_size()
    memory = mmap.mmap(-1, nbytes)  # shared: a fork must not move the parent's pages
    flat = torch.frombuffer(memory, dtype=like.dtype, count=elements)
    buffer = flat.view(like.shape)
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), nbytes, 0))
    if code:
        warnings.warn(
            f"AdamOffload: page-locking {nbytes} bytes of host memory failed (CUDA error "
            f"{code}); copies from and to the device will not overlap",
            stacklevel=2,
        )
    else:
        # `memory` in the arguments keeps the mapping until it is unlocked.
        release = weakref.finalize(buffer, _unlock, buffer.data_ptr(), memory)
        release.atexit = False
    return buffer


def _unlock(address: int, memory: mmap.mmap) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class Transfers:
    """Copies between parameters on CUDA devices and the host."""

    def __init__(self) -> None:
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._hooks: dict[torch.Tensor, Any] = {}
        # By parameter: the gradient that was copied, its version then, and when it is there.
        self._copied: dict[torch.Tensor, tuple[Any, int, Any]] = {}
        self._stale_steps = 0

    def watch(self, param: torch.Tensor) -> None:
        """Copy the parameter's gradient after every backward, until `step()` asks for it."""
        if param in self._hooks or not (param.requires_grad and param.is_leaf):
            return
        reference = weakref.ref(self)

        def on_gradient(ready: torch.Tensor) -> None:
            transfers = reference()
            if transfers is not None and transfers._stale_steps < _STALE_STEPS:
                transfers._begin(ready)

        self._hooks[param] = param.register_post_accumulate_grad_hook(on_gradient)

    def buffer(self, param: torch.Tensor) -> torch.Tensor:
        """Return the parameter's pinned buffer."""
        buffer = self._buffers.get(param)
        if buffer is None or buffer.dtype != param.dtype:
            buffer = self._buffers[param] = pinned(param)
        return buffer

    def _down_up(self, device: torch.device) -> tuple[Any, Any]:
        if device not in self._streams:
            self._streams[device] = (
                torch.cuda.Stream(device),
                torch.cuda.Stream(device),
            )
        return self._streams[device]

    @torch.no_grad()
    def _begin(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is None or grad.is_sparse:
            return
        buffer = self.buffer(param)
        down, _ = self._down_up(param.device)
        # The gradient is complete on the stream that called the hook, or step().
        down.wait_stream(torch.cuda.current_stream(param.device))
        with torch.cuda.stream(down):
            buffer.copy_(grad, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(down)
        # zero_grad() may free the gradient while it is still being read.
        grad.record_stream(down)
        self._copied[param] = (weakref.ref(grad), grad._version, arrived)

    def collect(self, params: Iterable[torch.Tensor], unscaled: bool = False) -> None:
        """Begin every copy that backward has not begun, or that the gradient has outlived.

        A gradient may have been clipped or replaced after it was copied; its version counter
        says so.

        Args:
            params: in the order in which they will be updated.
            unscaled: a GradScaler has unscaled the gradients, which no version counter says.
        """
        stale = used = False
        for param in params:
            self.watch(param)
            copied = self._copied.get(param)
            if copied is not None:
                grad, version, _ = copied
                same = grad() is param.grad and version == param.grad._version
                if same and not unscaled:
                    used = True
                    continue
                stale = True
            self._begin(param)
        if stale:
            self._stale_steps += 1
        elif used:
            self._stale_steps = 0

    def gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return the gradient in the pinned buffer; blocks until it is there."""
        _, _, arrived = self._copied.pop(param)
        arrived.synchronize()
        return self.buffer(param)

    def send(self, param: torch.Tensor) -> None:
        """Begin to copy the pinned buffer into the parameter."""
        _, up = self._down_up(param.device)
        # Backward may still be reading the parameter.
        up.wait_stream(torch.cuda.current_stream(param.device))
        with torch.cuda.stream(up):
            param.copy_(self.buffer(param), non_blocking=True)

    def finish(self) -> None:
        """Block until every parameter is back."""
        for device, (_, up) in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(up)
            up.synchronize()
