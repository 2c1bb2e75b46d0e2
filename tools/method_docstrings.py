"""Docstrings of `multiring.all_reduce` and the like for the reference, which is built without running any code."""

from __future__ import annotations

from typing import Any

import griffe


class MethodDocstrings(griffe.Extension):
    """Give each function of `import multiring` that has no docstring that of the communicator's method.

    When Multiring runs, a decorator does so.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called by griffe when a package is loaded."""
        if pkg.path != "multiring":
            return
        methods = pkg["Communicator"].final_target.members
        for name, function in pkg["all_reduce"].final_target.parent.functions.items():
            if function.docstring is None and name in methods:
                function.docstring = methods[name].docstring
