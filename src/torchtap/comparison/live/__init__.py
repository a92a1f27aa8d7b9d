"""What running two models shows."""
