"""Files of weights: how they are read, and the forms they come in."""
