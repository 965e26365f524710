"""The part that needs Horovod: the op in C++, its build, starting and elastic jobs."""
