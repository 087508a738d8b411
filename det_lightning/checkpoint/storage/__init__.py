"""Where checkpoints are kept: directories and buckets, staging directories, transfer."""
