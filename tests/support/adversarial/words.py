"""What programs that are text may name, wherever they are."""

# ruff: noqa: F401

import abc
import collections
import contextlib
import contextvars
import copy
import csv
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import inspect
import io
import itertools
import math
import operator
import pickle
import queue
import random
import re
import signal
import sqlite3
import sys
import threading
import types
import typing
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import torch
from support.adversarial.holders import ANNOTATIONS, ANYTHING, HOLDERS
from support.adversarial.observed import observed
from support.adversarial.program import (
    Of,
    State,
    around,
    back,
    leaf,
    loop,
    nothing,
    ran,
    reversed_loop,
    together,
    trained,
    within,
    work,
)
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_of_torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    get_gradient_edge,
    register_multi_grad_hook,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.nn import functional
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.overrides import has_torch_function
from torch.utils import dlpack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
