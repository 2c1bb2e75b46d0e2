"""Multiring in Apache Spark: functions that run as ranks in its executors, and Estimators that train there."""

from typing import TYPE_CHECKING, Any

from multiring.spark.stage import run

if TYPE_CHECKING:
    from multiring.spark.estimators import KerasEstimator, KerasModel, TorchEstimator, TorchModel

__all__ = ["KerasEstimator", "KerasModel", "TorchEstimator", "TorchModel", "run"]


def __getattr__(name: str) -> Any:
    """The Estimators, when they are first asked for: `run` does without pyspark.ml."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multiring.spark import estimators

    return getattr(estimators, name)
