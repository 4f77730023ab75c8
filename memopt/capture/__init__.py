"""From a module to its captured step: Dynamo, AOTAutograd, and what a trace must not lose."""
