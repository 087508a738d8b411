"""Files that several packages read and write: strict JSON, private files, what is no file at all."""
