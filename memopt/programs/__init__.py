"""What a plan is made of: instructions, their lifetimes, replay and validation. No torch."""
