"""Hidden states of the target: how they are computed and stored, and their memory."""
