"""MindSpore's wrap cells, gradient reducer, boost switch and rank tables, without a framework.

`adasum_hvd.torch.mindspore` and `adasum_hvd.tensorflow.mindspore` complete them.
"""
