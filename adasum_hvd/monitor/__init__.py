"""What AdaSum does in a run, tensor by tensor: docs/monitor.md.

Without a framework: what the op found (`statistics`), where it goes (`sinks`), and when it is
asked for (`watcher`). Each framework's `AdasumMonitor` says what there is to watch.
"""
