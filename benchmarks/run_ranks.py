"""horovodrun, as tests and benchmarks start it: without importing every framework first.

Before it starts ranks, horovodrun imports TensorFlow or torch to ask whether Horovod was built with
Gloo. It was, or the ranks raise an error. Its processes import this file too.
"""

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
