"""Starting Horovod where another launcher has started the ranks.

A gradient's way does not lead through here; a rank's start does:

- `schedulers/`: one file each, a pure function from an environment to a `Place`;
- `place.py`: what such a function returns, and how it reads variables;
- `assignment.py`: from all ranks' places to Horovod's variables;
- `route.py`: addresses and network interfaces;
- `meeting.py`: how the ranks tell one another, with and without a store of torch's;
- `start.py`: all of it, before Horovod's `init`;
- `command.py`: all of it, before a program that knows nothing of it (`adasum-hvd exec`).
"""
