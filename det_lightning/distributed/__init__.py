"""How the processes of a run train together: placing models on devices, exchanging gradients, gathering states."""
