"""How several driver processes work together: who is present, what they say to each other, channels between them."""
