"""What Determined starts inside of a trial's container, at its paths."""
