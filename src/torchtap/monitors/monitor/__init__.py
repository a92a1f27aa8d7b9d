"""`Monitor` and `MonitoredTrainer`."""
