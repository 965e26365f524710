"""Starting Horovod in processes that another launcher has started.

A rank's start runs through these files:

- `launchers.py`: the table of launchers' variables, and the innermost launcher;
- `launch_context.py`: a rank's place, as its launcher describes it;
- `slurm_lists.py`: Slurm's compressed lists of nodes and of tasks;
- `route.py`: addresses and network interfaces;
- `rendezvous.py`: exchange of `RankInfo` through a key-value store;
- `assignment.py`: from all ranks' `RankInfo` to Horovod's variables;
- `variables.py`: these steps in order, before Horovod's `init`;
- `command.py`: `adasum-hvd exec`, the same for a program that calls plain Horovod.

`supervisor.py` ends commands with all that they have started, for other rooms, too.
"""
