"""All situations, in one table."""

from tests.surroundings import contexts as contexts
from tests.surroundings import functions as functions
from tests.surroundings import hooks as hooks
from tests.surroundings import objects as objects
from tests.surroundings import outside as outside
from tests.surroundings.situation import SITUATIONS as SITUATIONS
