"""Where checkpoints lie: directories and buckets, staging directories, transfer, claims of live runs."""
