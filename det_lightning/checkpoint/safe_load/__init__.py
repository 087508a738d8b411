"""Reading the files of a checkpoint that nobody vouches for, without running what they carry."""
