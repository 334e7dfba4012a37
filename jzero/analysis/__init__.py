"""What the compiler made of a step."""
