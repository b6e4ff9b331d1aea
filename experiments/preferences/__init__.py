"""The parts of measure_preferences.py: what is trained and measured, and its table."""
