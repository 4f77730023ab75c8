"""Plan files: versioned JSON that is checked whole and never executed."""

from memopt.files.plan_file import from_bytes as from_bytes
from memopt.files.plan_file import load as load
from memopt.files.plan_file import save as save
from memopt.files.plan_file import to_bytes as to_bytes
