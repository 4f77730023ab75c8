"""OLLA (Steiner et al. 2022): the order of operators and the addresses of tensors."""

from memopt.strategies.olla.buffers import Buffer as Buffer
from memopt.strategies.olla.buffers import Placement as Placement
from memopt.strategies.olla.buffers import lower_bound as lower_bound
from memopt.strategies.olla.csv_files import read_buffers as read_buffers
from memopt.strategies.olla.csv_files import write_buffers as write_buffers
from memopt.strategies.olla.ordering import Ordering as Ordering
from memopt.strategies.olla.ordering import order_tasks as order_tasks
from memopt.strategies.olla.passes import order_program as order_program
from memopt.strategies.olla.passes import place_program as place_program
from memopt.strategies.olla.passes import program_buffers as program_buffers
from memopt.strategies.olla.placement import place as place
from memopt.strategies.olla.strategy import Olla as Olla
