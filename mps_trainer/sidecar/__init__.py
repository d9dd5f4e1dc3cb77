"""The process that trains: intake, journal, replay buffer, trainer, checkpoints, metrics. It begins in `service.py`."""
