"""Where it runs: the backend, what TileLang means on a CPU, devices, and timing."""
