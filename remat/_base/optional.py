"""What messages say where a package that remat does not depend on is not installed.

Rejected: to name the extra of remat, `remat[budget]`. From a clone that is spelled
otherwise, and the package alone is enough.
"""


def missing(package: str) -> str:
    """Say that a package is not installed, and what to run.

    >>> missing("scipy")
    'scipy is not installed (pip install scipy)'
    """
    return f"{package} is not installed (pip install {package})"
