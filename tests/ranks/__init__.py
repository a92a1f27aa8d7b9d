"""Trainings on several processes."""
