"""How fast it is: benchmark, peer libraries, the search for better literals, and the layer for torch."""
