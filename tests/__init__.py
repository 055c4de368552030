"""The suite: `make test`, or `python -m pytest tests/layers` for a part of it.

Its folders mirror those of `equivit`, `kernels`, `experiments` and `colabs`; `parity` compares with arrays of the
official codes (`fixtures` holds a selection, $EQUIVIT_PARITY names the directory of all), `recipes` runs every config
for two steps.  `conftest.py` sets eight virtual CPU devices, and prints what each folder took of its CPU seconds.
"""
