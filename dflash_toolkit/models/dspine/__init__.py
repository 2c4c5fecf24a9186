"""The additions of DSpine to a DFlash drafter: messages from slot to slot between the layers, and a walk over pairs."""
