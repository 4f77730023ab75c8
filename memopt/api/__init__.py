"""The user's entry points (plan, compare, fits, profile) and the records that they return."""
