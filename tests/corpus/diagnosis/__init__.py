"""Sick trainings with their healthy twins, and healthy ones that look odd: what the doctor names, where and when."""
