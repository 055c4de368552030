"""Public symmetry checks, also for your own layers and models."""

from equivit.testing.equivariance import assert_equivariant as assert_equivariant
from equivit.testing.parameters import randomise as randomise
from equivit.testing.shifts import assert_shift_equivariant as assert_shift_equivariant
