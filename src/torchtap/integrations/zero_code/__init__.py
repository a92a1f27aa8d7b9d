"""Record a training whose script knows nothing of torchtap."""
