"""Programs, which plans consist of: instructions, lifetimes, replay and validation. No torch."""
