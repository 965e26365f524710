"""The parts of `resnet50_imagenet.py`: model, data, recipe, monitors, checkpoints."""
