"""Rotor: rematerialisation of chains (Beaumont et al.), exact programs and yardsticks."""

from memopt.strategies.rotor.strategies import Revolve as Revolve
from memopt.strategies.rotor.strategies import Rotor as Rotor
from memopt.strategies.rotor.strategies import RotorFree as RotorFree
from memopt.strategies.rotor.strategies import RotorOptimal as RotorOptimal
from memopt.strategies.rotor.strategies import Sequential as Sequential
