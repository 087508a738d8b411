"""How a trial trains, without Lightning: run, schedule, metrics, validation, data, boundaries, resuming."""
