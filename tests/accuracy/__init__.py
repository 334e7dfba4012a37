"""How far the estimates of memory and time are from the compilers: tools for whoever changes a rule of these.

python -m tests.accuracy.estimates --topology h200:8    # estimated beside compiled peaks
python -m tests.accuracy.fit_check                      # the choices of `jzero.fit` against its compiled candidates
"""
