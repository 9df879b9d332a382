"""What a cluster can do, measured on its ranks: `mics measure`."""
