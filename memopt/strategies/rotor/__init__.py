"""Rotor: rematerialisation of chains (Beaumont et al.), exact programs and yardsticks."""
