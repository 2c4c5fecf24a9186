"""The objective of a step: draft blocks, losses and the selector's loss."""
