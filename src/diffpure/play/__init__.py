"""The playground: one image, an attack and a purification, in a browser."""
