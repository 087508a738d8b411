"""Local files and their content, for several packages: locks, whole and private files, strict JSON."""
