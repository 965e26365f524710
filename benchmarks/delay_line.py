"""A switch whose ports deliver late: what netem does, on kernels that have none too.

    python delay_line.py SECONDS BYTES_PER_SECOND INTERFACE PID ...

Gives every process's network namespace an interface INTERFACE (a TAP device), prints "ready",
and carries Ethernet frames between them, SECONDS after they came and no faster to a port than
BYTES_PER_SECOND, until it is killed. Frames stay unsegmented where the sender's kernel leaves
them so.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VIRTIO_HEADER_BYTES = 10
LARGEST_FRAME_BYTES = 1 << 17


def interface_of(pid: str, name: str) -> int:
    """Return the file descriptor of a new TAP device in the network namespace of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to the network of process {pid}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def carry(devices: list[int], delay: float, speed: float) -> None:
    """Move frames for ever; a frame for an address not yet seen goes to all other ports."""
    ports: dict[bytes, int] = {}
    # When a port will have delivered all that waits for it.
    idle = dict.fromkeys(devices, 0.0)
    waiting: list[tuple[float, int, int, bytes]] = []  # a heap
    for count in itertools.count():
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, [], [], pause)[0]:
            frame = os.read(device, LARGEST_FRAME_BYTES)
            target = frame[VIRTIO_HEADER_BYTES : VIRTIO_HEADER_BYTES + 6]
            ports[frame[VIRTIO_HEADER_BYTES + 6 : VIRTIO_HEADER_BYTES + 12]] = device
            others = [port for port in devices if port != device]
            for port in [ports[target]] if target in ports else others:
                due = max(time.monotonic() + delay, idle[port]) + len(frame) / speed
                idle[port] = due
                heapq.heappush(waiting, (due, count, port, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, port, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a port that is down loses it
                os.write(port, frame)


def main() -> None:
    """Run the command line."""
    delay, speed, name, *pids = sys.argv[1:]
    devices = [interface_of(pid, name) for pid in pids]
    print("ready", flush=True)
    carry(devices, float(delay), float(speed))


if __name__ == "__main__":
    main()
