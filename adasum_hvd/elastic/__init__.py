"""Elastic jobs: the state that ranks share, and their rendezvous after a change of ranks."""
