"""Adam with its moments and master weights on the host, for torch and for Keras; no Horovod.

`adam.py` has the formula and its arguments, without a framework. `optimizer.py` is torch's
`AdamOffload`, which is also `adasum_hvd.adam_offload.AdamOffload`; `keras.py` is Keras's.
"""
