"""Files that several packages write: strict JSON, and files that only their owner may read."""
