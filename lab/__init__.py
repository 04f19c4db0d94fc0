"""Measurements, and the commands of python -m nanollm; stored/ has the measured rows."""
