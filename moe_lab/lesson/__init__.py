"""What you see and touch: exercises, pictures, plots, the tile explorer, notebooks, and the export."""
