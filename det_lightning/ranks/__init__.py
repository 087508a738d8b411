"""How the processes of a run meet and talk: topology, store, exchange of objects, watching each other, signals."""
