"""Groups of the pixel grid and their action on images, token grids and fields.  Mathematics only, no Flax."""
