"""Observation of a trial: its calls, its accesses and its state while it trains, and its source."""
