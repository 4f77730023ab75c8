"""Plan files: versioned JSON that is checked whole and never executed."""

from memopt.files.plan_file import load as load
from memopt.files.plan_file import save as save
