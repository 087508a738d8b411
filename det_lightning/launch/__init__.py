"""Launchers: each starts the processes of a distributed run, as ``python -m det_lightning.launch.NAME``."""
