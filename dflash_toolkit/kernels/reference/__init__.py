"""Plain torch definitions of all operations, written for reading: one module for each kind.

They handle tensors, not models. A step has M = B * S rows: S consecutive positions of each of B requests.
"""

from .attention import *
from .delta import *
from .experts import *
from .layer import *
from .layer_inputs import *
from .loss import *
from .matmul import *
from .norm import *
from .rope import *
from .sampling import *
from .selection import *
from .slots import *
from .tree import *
