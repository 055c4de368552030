"""Models, one folder or file per architecture.

`create` builds a named model, and `abstract` builds it with shapes instead of arrays.  `reconfigure` changes the
configuration of a model, `rebuild` also its family or size, and `fitting_tensors` returns the tensors that fit.
`adapt` makes a model truly shift-equivariant.
"""

from equivit.models.adaptive import adapt
from equivit.models.reconfiguration import fitting_tensors, rebuild, reconfigure
from equivit.models.zoo import abstract, create, names

__all__ = ["abstract", "adapt", "create", "fitting_tensors", "names", "reconfigure", "rebuild"]
