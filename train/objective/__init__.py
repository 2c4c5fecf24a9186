"""What a step minimises: blocks, losses, and the step over them."""
