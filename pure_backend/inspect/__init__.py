"""Ask what the compiler did, and what it runs on."""

from pure_backend.inspect.environment import Environment as Environment
from pure_backend.inspect.environment import Problem as Problem
from pure_backend.inspect.environment import report_environment as report_environment
from pure_backend.inspect.explain import explain as explain
from pure_backend.inspect.profiling import make_xla_traces_traceable as make_xla_traces_traceable
from pure_backend.inspect.profiling import scope as scope
from pure_backend.inspect.report import Break as Break
from pure_backend.inspect.report import Graph as Graph
from pure_backend.inspect.report import Node as Node
from pure_backend.inspect.report import Partition as Partition
from pure_backend.inspect.report import Report as Report
