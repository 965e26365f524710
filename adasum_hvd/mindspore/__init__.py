"""MindSpore's wrap cells, gradient reducer, boost switch, rank tables and checkpoints.

Without a framework, except `torch_checkpoint.py`. `adasum_hvd.torch.mindspore` and
`adasum_hvd.tensorflow.mindspore` complete the cells and the reducer.
"""
