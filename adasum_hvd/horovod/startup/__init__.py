"""Before and after Horovod's `init`: preflight checks, groups, logging, the exception hook."""
