"""Tools for testing Perdure and what is built on it: real servers, contract suites, faults.

They are shipped with the package so that third parties run the same tests. Of the
library only the command `perdure drill` imports them.
"""
