"""DCP decode as a Pallas Mosaic GPU kernel for Hopper."""
