"""OLLA (Steiner et al. 2022): the order of operators and the addresses of tensors."""

from memopt.passes.order.ordering import order_tasks as order_tasks
from memopt.passes.passes import order_program as order_program
from memopt.passes.passes import place_program as place_program
from memopt.passes.passes import program_buffers as program_buffers
from memopt.passes.place.buffers import Buffer as Buffer
from memopt.passes.place.buffers import Placement as Placement
from memopt.passes.place.buffers import lower_bound as lower_bound
from memopt.passes.place.csv_files import read_buffers as read_buffers
from memopt.passes.place.csv_files import write_buffers as write_buffers
from memopt.passes.place.placement import place as place
from memopt.strategies.olla.strategy import Olla as Olla
