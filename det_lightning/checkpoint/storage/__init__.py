"""Where checkpoints are kept: directories and buckets, staging directories, transfer, claims of live runs."""
