"""The files of a checkpoint: names, content, checksums, older layouts, the copy of the code."""
