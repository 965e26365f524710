"""Advice from the convergence studies: variant, learning rate, and the banner that prints both."""
