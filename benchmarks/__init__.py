"""What torchtap costs, measured beside bare PyTorch and its peers. Each file has ``run() -> rows``."""
