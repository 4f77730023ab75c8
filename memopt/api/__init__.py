"""What users call: plan, compare, fits, profile, and what they hold."""
