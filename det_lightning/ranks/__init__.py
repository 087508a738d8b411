"""How the processes of a run find each other, exchange objects, and notice signals and each other's end."""
