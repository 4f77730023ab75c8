"""All situations, in one table."""

from tests.surroundings import attributes as attributes
from tests.surroundings import calls as calls
from tests.surroundings import containers as containers
from tests.surroundings import contexts as contexts
from tests.surroundings import functions as functions
from tests.surroundings import hooks as hooks
from tests.surroundings import loops as loops
from tests.surroundings import outside as outside
from tests.surroundings import randomness as randomness
from tests.surroundings.situation import SITUATIONS as SITUATIONS
