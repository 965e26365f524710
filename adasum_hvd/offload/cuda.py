"""`AdamOffload` on CUDA: gradients to the host during backward, parameters back in `step()`.

Each parameter has one pinned host buffer in its dtype. It receives the gradient, and after the
update it holds the new weights that are sent back. Each device has one stream per direction, so
both copies and the host's arithmetic overlap.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch

# After so many consecutive steps with outdated early copies, gradients are copied in step().
_STALE_STEPS = 2


def pinned(like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialized page-locked host tensor of `like`'s shape and dtype.

    torch rounds its pinned memory up to a power of two; this allocation is exact to the page.
    """
    elements = like.numel()
    if elements == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    nbytes = elements * like.element_size()
    # Shared memory, so that a fork does not move the parent's pages.
    memory = mmap.mmap(-1, nbytes)
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
        # The argument `memory` keeps the mapping until it is unlocked.
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
        # By parameter: the copied gradient, its version, and the event of the copy's end.
        self._copied: dict[torch.Tensor, tuple[Any, int, Any]] = {}
        self._stale_steps = 0

    def watch(self, param: torch.Tensor) -> None:
        """Copy a parameter's gradient to the host after every backward pass, if it is on CUDA."""
        trained = param.is_cuda and param.requires_grad and param.is_leaf
        if param in self._hooks or not trained:
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
            down, up = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._streams[device] = down, up
        return self._streams[device]

    @torch.no_grad()
    def _begin(self, param: torch.Tensor) -> None:
        grad = param.grad
        if grad is None or grad.is_sparse:
            return
        buffer = self.buffer(param)
        down, _ = self._down_up(param.device)
        # The gradient is complete on the stream that called the hook or step().
        down.wait_stream(torch.cuda.current_stream(param.device))
        with torch.cuda.stream(down):
            buffer.copy_(grad, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(down)
        # zero_grad() may free the gradient while the copy still reads it.
        grad.record_stream(down)
        self._copied[param] = (weakref.ref(grad), grad._version, arrived)

    def collect(self, params: Iterable[torch.Tensor], unscaled: bool = False) -> None:
        """Start every copy that backward did not start, or whose gradient has changed since.

        A version counter shows that a gradient was clipped or replaced after its copy, but not
        that a GradScaler has `unscaled` it.
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
        """Wait for the copy and return the gradient in the pinned buffer."""
        _, _, arrived = self._copied.pop(param)
        arrived.synchronize()
        return self.buffer(param)

    def send(self, param: torch.Tensor) -> None:
        """Start to copy the pinned buffer to the parameter."""
        _, up = self._down_up(param.device)
        # Backward may still be reading the parameter.
        up.wait_stream(torch.cuda.current_stream(param.device))
        with torch.cuda.stream(up):
            param.copy_(self.buffer(param), non_blocking=True)

    def finish(self) -> None:
        """Block until every parameter has been copied."""
        for device, (_, up) in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(up)
            up.synchronize()
