"""How a trial trains, without Lightning: run, schedule, metrics, validation, data, events, resume, stopping."""
