"""Elastic jobs: the state that ranks share, and the rendezvous before each start of Horovod."""
