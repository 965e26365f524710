"""List the launchers of adasum_hvd/horovod/launch/launchers.py in docs/clusters.md.

python docs/launchers.py
"""

from __future__ import annotations

from pathlib import Path

from adasum_hvd.horovod.launch.launchers import LAUNCHERS, Launcher

PAGE = Path(__file__).with_name("clusters.md")
BEGIN, END = "<!-- python docs/launchers.py -->\n", "<!-- end of the table -->\n"


def _row(launcher: Launcher) -> str:
    local = launcher.local_rank, launcher.local_size
    cross = launcher.cross_rank, launcher.cross_size, launcher.hosts
    cells = (
        (" or ".join(f"`{name}`" for name in launcher.rank), launcher.size),
        *(local, cross, launcher.job),
    )
    columns = [
        ", ".join(name if "`" in name else f"`{name}`" for name in names if name)
        for names in cells
    ]
    return f"| {' | '.join([launcher.name, str(launcher.level), *columns])} |\n"


def table() -> str:
    """Return the table between the two marks of the page."""
    head = "launcher | level | rank, size | local rank, local size | host, hosts | job"
    lines = f"| {head} |\n|{'---|' * 6}\n"
    return lines + "".join(_row(launcher) for launcher in LAUNCHERS)


def page(text: str) -> str:
    """Return the page with the current table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
