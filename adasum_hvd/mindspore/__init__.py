"""What MindSpore has and Horovod has not: cells, the gradient reducer, contexts, rank tables.

No framework in here; `adasum_hvd.torch.mindspore` and `adasum_hvd.tensorflow.mindspore` add theirs.
"""
