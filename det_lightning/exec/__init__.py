"""Commands that Determined starts in a trial's container, at Determined's paths."""
