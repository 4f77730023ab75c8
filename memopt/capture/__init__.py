"""Captures a module's step: Dynamo, AOTAutograd, and corrections of what a trace would lose."""
