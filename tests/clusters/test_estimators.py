"""Estimators and Models of Spark ML: partitions of any sizes train what one process would, and are predicted."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import estimator_ranks as ranks
import numpy as np
import pytest
import torch
from pyspark import SparkContext
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.functions import array_to_vector
from pyspark.sql import DataFrame, SparkSession, functions
from spark_masters import CLUSTER, LOCAL
from torch.nn import functional

import multiring as mr
from multiring.spark import KerasEstimator, KerasModel, TorchEstimator, TorchModel
from multiring.spark.identity import told

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # files and sockets of pyspark's own
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras saves tensors of torch
]

local = pytest.mark.parametrize("spark", [LOCAL], indirect=True)
cluster = pytest.mark.parametrize("spark", [CLUSTER], indirect=True)

SIZES = (21, 0, 9)
"""Rows of each partition: with batches of 4 the ranks have 6, 0 and 3 of them."""


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(3).normal(size=(rows, 4)).astype(np.float32)
    return x, (x @ np.float32([1, -2, 3, 0.5]) + 2).astype(np.float32)


def frame(
    spark: SparkContext, sizes: Iterable[int] = SIZES, schema: str = "row int, x array<double>, y double"
) -> DataFrame:
    """Rows of `table` in partitions of these sizes."""
    cuts = np.cumsum([0, *sizes]).tolist()
    x, y = table(cuts[-1])
    rows = [(i, x[i].tolist(), float(y[i])) for i in range(cuts[-1])]
    parts = [rows[start:stop] for start, stop in itertools.pairwise(cuts)]
    found = spark.parallelize(range(len(parts)), len(parts)).flatMap(lambda part: parts[part])
    return SparkSession(spark).createDataFrame(found, schema)


def global_batches(sizes: Iterable[int], size: int) -> list[np.ndarray]:
    """The rows of each step, where ranks take their partitions in order."""
    cuts = np.cumsum([0, *sizes])
    steps = range(0, max(np.diff(cuts)), size)
    return [
        np.concatenate([np.arange(a + step, min(a + step + size, b)) for a, b in itertools.pairwise(cuts)])
        for step in steps
    ]


def estimator(**changes: Any) -> TorchEstimator:
    given = {"model": ranks.linear, "optimizer": ranks.sgd, "loss": functional.mse_loss, "num_proc": 3, "batch_size": 4}
    return TorchEstimator(**{**given, "feature_cols": "x", "label_cols": "y", **changes})


def assert_nothing_is_left(spark: SparkContext) -> None:
    assert spark._jsc.getPersistentRDDs().size() == 0
    assert list(spark._jsc.sc().statusTracker().getActiveJobIds()) == []


def test_frameworks_are_imported_when_they_are_used() -> None:
    code = (
        "import sys; from multiring.spark import KerasEstimator, TorchEstimator\n"
        "print([name for name in ('torch', 'keras') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@local
def test_an_epoch_is_that_of_one_process_on_the_global_batches(spark: SparkContext) -> None:
    data = frame(spark)
    model = estimator(model=ranks.masked, shuffle=False, metrics={"absolute": ranks.absolute}).fit(data)
    x, y = map(torch.from_numpy, table(sum(SIZES)))
    alone = ranks.masked()
    optimizer = ranks.sgd(alone)
    losses, absolutes = [], []
    for batch in global_batches(SIZES, 4):
        optimizer.zero_grad()
        outputs = alone(x[batch])[:, 0]
        loss = functional.mse_loss(outputs, y[batch])
        loss.backward()
        optimizer.step()
        losses.append(len(batch) * loss.item())
        absolutes.append(len(batch) * (outputs - y[batch]).abs().mean().item())
    assert [len(batch) for batch in global_batches(SIZES, 4)] == [8, 8, 5, 4, 4, 1]
    torch.testing.assert_close(model.model.state_dict(), alone.state_dict())
    assert torch.equal(model.model.mask, alone.mask)  # though one rank has no rows
    assert model.history["loss"] == pytest.approx([sum(losses) / sum(SIZES)], rel=1e-5)
    assert model.history["absolute"] == pytest.approx([sum(absolutes) / sum(SIZES)], rel=1e-5)
    predicted = model.transform(data)
    assert predicted.columns == ["row", "x", "y", "prediction"]
    expected = alone(x)[:, 0].tolist()
    for row in predicted.collect():
        assert row.prediction == pytest.approx(expected[row.row], rel=1e-5), row
        assert row.y == y[row.row].item()
    assert_nothing_is_left(spark)


@local
def test_validation_buffers_and_more_partitions_than_ranks(spark: SparkContext) -> None:
    """A union cannot be computed within a barrier stage; vectors and a column say what is what."""
    whole = frame(spark, [7, 12, 0, 4, 9, 8]).withColumn("held", functions.col("row") % 4 == 0)
    data = whole.where("row < 20").union(whole.where("row >= 20")).withColumn("x", array_to_vector("x"))
    model = estimator(model=ranks.normed, validation="held", num_proc=None, epochs=2).fit(data)
    assert sorted(model.history) == ["loss", "val_loss"]
    assert len(model.history["loss"]) == len(model.history["val_loss"]) == 2
    x, y = map(torch.from_numpy, table(40))
    held = torch.arange(40) % 4 == 0
    trained = model.model
    assert model.history["val_loss"][1] == pytest.approx(
        functional.mse_loss(trained(x[held])[:, 0], y[held]).item(), rel=1e-5
    )
    assert not torch.equal(trained[1].running_mean, torch.zeros(2))
    assert model.transform(data).where("prediction is not null").count() == 40
    assert_nothing_is_left(spark)


@local
def test_inputs_of_several_kinds(spark: SparkContext) -> None:
    data = SparkSession(spark).createDataFrame(
        [(0.5, [1, 2], 1, "a"), (1.5, [3, 4], 2, "b"), (2.5, [5, 6], 0, "c")],
        "n float, pair array<int>, k tinyint, s string",
    )
    options = {"model": ranks.TwoInputs(), "feature_cols": [["n", "pair"], ["k"]], "label_cols": "n", "num_proc": 1}
    model = estimator(**options, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.0)).fit(data.coalesce(1))
    found = [(row.s, row.prediction) for row in model.transform(data).collect()]
    assert found == [("a", 23.5), ("b", 308.5), ("c", 14.5)]
    whole = data.selectExpr("cast(n as int) as n", "pair", "k", "s as `multi.ring`", "s as `multi.ring`")
    predicted = model.transform(whole)  # the first input of integers, which floats were trained on
    assert predicted.columns == ["n", "pair", "k", "multi.ring", "multi.ring", "prediction"]
    assert [(row[0], row[4], row[5]) for row in predicted.collect()] == [
        (0, "a", 23.0),
        (1, "b", 308.0),
        (2, "c", 14.0),
    ]
    with pytest.raises(TypeError, match=r"trained on integers, and some of the column\(s\) 'k' \(float\) hold others"):
        model.transform(data.withColumn("k", functions.col("n")))
    with pytest.raises(ValueError, match=r"feature_cols=\[\['n'\]\]: the model was trained on 2 input\(s\)"):
        model.copy({model.feature_cols: "n"}).transform(data)
    options = {"model": ranks.linear(3, 3), "feature_cols": ["n", "pair"], "label_cols": "k", "num_proc": 1}
    classes = estimator(**options, loss=functional.cross_entropy, shuffle=False).fit(data.coalesce(1))
    outputs = ranks.linear(3, 3)(torch.tensor([[0.5, 1, 2], [1.5, 3, 4], [2.5, 5, 6]]))  # as many rows as classes
    expected = functional.cross_entropy(outputs, torch.tensor([1, 2, 0])).item()
    assert classes.history["loss"] == pytest.approx([expected])


@local
def test_a_model_is_saved_alone_and_in_a_pipeline(spark: SparkContext, tmp_path: Path) -> None:
    data = frame(spark)
    whole = Pipeline(stages=[estimator(model=ranks.linear(4, 3), label_cols=["y", "y", "row"], predict="class")])
    whole.write().overwrite().save(f"{tmp_path}/unfitted")
    again = Pipeline.load(f"{tmp_path}/unfitted")
    assert again.getStages()[0].uid == whole.getStages()[0].uid
    fitted = again.fit(data)
    model = fitted.stages[0]
    assert len(model.model.weight) == 3
    assert model.history == whole.fit(data).stages[0].history
    expected = model.model(torch.from_numpy(table(sum(SIZES))[0])).argmax(1).tolist()
    fitted.write().overwrite().save(f"{tmp_path}/pipeline")
    model.write().overwrite().save(f"{tmp_path}/model")
    model.write().overwrite().save(f"{tmp_path}/model")
    alone = TorchModel.load(f"{tmp_path}/model")
    assert (alone.uid, alone.history) == (model.uid, model.history)
    for each in (model, alone, PipelineModel.load(f"{tmp_path}/pipeline")):
        assert [row.prediction for row in each.transform(data).sort("row").collect()] == expected
    vectors = model.copy({model.predict: "output", model.prediction_col: "out"}).transform(data)
    assert vectors.schema["out"].dataType.simpleString() == "vector"
    assert [int(row.out.argmax()) for row in vectors.sort("row").collect()] == expected
    with pytest.raises(ValueError, match=r"holds a multiring\.spark\.estimators\.TorchModel"):
        KerasModel.load(f"{tmp_path}/model")


@local
def test_a_fit_goes_on_from_its_store_after_a_rank_was_killed(
    spark: SparkContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)  # the executors work elsewhere
    data, file = frame(spark), tmp_path / "store" / "multiring-checkpoint"
    options = {"epochs": 3, "validation": 0.2, "model": torch.nn.Sequential(torch.nn.Dropout(), ranks.linear())}
    whole = estimator(**options).fit(data)
    fatal = estimator(**options, store="store", loss=ranks.FatalLoss(tmp_path, 2, 8))
    with pytest.raises(mr.PeerLost, match=r"rank 2 \(executor \S+, process \d+\) of 3 was lost") as raised:
        fatal.fit(data)
    assert raised.value.rank == 2
    assert_nothing_is_left(spark)
    done = len(json.loads(file.read_bytes().partition(b"\n")[0])["history"]["loss"])
    assert done == 2
    others = {
        fatal.label_cols: "row",
        fatal.validation: None,
        fatal.optimizer: lambda model: torch.optim.SGD(model.parameters(), 0.5),
    }
    with pytest.raises(
        ValueError,
        match=r"another fit \(label_cols was y as float32, and is row as int64; optimizer was SGD .*0\.05.*, and is "
        r"SGD .*0\.5.*; validation was 0\.2, and is None\): delete the file, or give this fit a store of its own",
    ) as refused:
        fatal.fit(data, others)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="has 2 epochs of this fit, and epochs=1 asks for fewer: delete the file, or"):
        fatal.fit(data, {fatal.epochs: 1})
    again = fatal.fit(data)
    assert f"fit went on after epoch 2 of 3, from the checkpoint in {tmp_path}/store" in caplog.text
    assert again.history == whole.history
    torch.testing.assert_close(again.model.state_dict(), whole.model.state_dict(), rtol=0, atol=0)
    assert list(file.parent.iterdir()) == []
    file.write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"is no checkpoint of a fit \(JSONDecodeError: .*\): delete the file"):
        fatal.fit(data)


def test_a_loss_is_known_by_what_it_computes() -> None:
    def scaled(factor: float) -> Any:
        return lambda outputs, labels: factor * (outputs - labels).abs().mean()

    def squared(factor: float) -> Any:
        return lambda outputs, labels: factor * (outputs - labels).square().mean()

    assert told(functional.mse_loss) == '"torch.nn.functional.mse_loss"'
    losses = [scaled(2), scaled(3), squared(2), torch.nn.HuberLoss(), torch.nn.HuberLoss(delta=2.0), functional.l1_loss]
    again = [scaled(2), scaled(3), squared(2), torch.nn.HuberLoss(), torch.nn.HuberLoss(delta=2.0), functional.l1_loss]
    assert [[told(one) == told(other) for other in again] for one in losses] == np.eye(6, dtype=bool).tolist()


@local
def test_keras(spark: SparkContext, tmp_path: Path) -> None:
    import keras

    data = frame(spark)
    given = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    given.set_weights([np.arange(4.0).reshape(4, 1) / 10, np.array([0.25])])
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    options = {"batch_size": 4, "num_proc": 3, "shuffle": False, "metrics": ["mae"]}
    model = KerasEstimator(given, sgd, "mse", "x", "y", **options, store=f"{tmp_path}/store").fit(data)
    assert list((tmp_path / "store").iterdir()) == []
    alone = estimator(shuffle=False, metrics={"mae": ranks.absolute}).fit(data)
    kernel, bias = model.model.get_weights()
    np.testing.assert_allclose(kernel.T, alone.model.weight.detach(), rtol=1e-5)
    np.testing.assert_allclose(bias, alone.model.bias.detach(), rtol=1e-5)
    assert model.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-5)
    assert model.history["mae"] == pytest.approx(alone.history["mae"], rel=1e-5)
    with pytest.raises(
        ValueError, match=r"loss 'mse' cannot take labels of 2 number\(s\) \(column\(s\) 'y', 'row'\) and"
    ):
        KerasEstimator(given, sgd, "mse", "x", ["y", "row"], **options).fit(data)
    model.write().save(f"{tmp_path}/model")
    expected = [row.prediction for row in alone.transform(data).sort("row").collect()]
    found = [row.prediction for row in KerasModel.load(f"{tmp_path}/model").transform(data).sort("row").collect()]
    assert found == pytest.approx(expected, rel=1e-4)


@local
def test_other_params_of_a_fit(spark: SparkContext) -> None:
    given = estimator()
    data = frame(spark).withColumnRenamed("x", "a.x").withColumnRenamed("y", "y`")
    changes = {given.feature_cols: "a.x", given.label_cols: "y`", given.epochs: 2, given.prediction_col: "p.q`"}
    model = given.fit(data, changes)
    assert len(model.history["loss"]) == 2
    predicted = model.transform(data)
    assert predicted.columns == ["row", "a.x", "y`", "p.q`"]
    assert predicted.first()["a.x"] == data.first()["a.x"]
    with pytest.raises(ValueError, match="epochs=0: expected 1 or more"):
        given.fit(frame(spark), {given.epochs: 0})


class Unpicklable(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@local
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": 7}, TypeError, "model=7: expected a torch.nn.Module, or a function"),
        (
            {"model": Unpicklable()},
            TypeError,
            "model=Unpicklable.* cannot be pickled .*lock.* give a function that makes it",
        ),
        ({"optimizer": "sgd"}, TypeError, "optimizer='sgd': expected a function of the model"),
        (
            {"optimizer": torch.optim.SGD},
            TypeError,
            r"optimizer=torch.optim.SGD: expected .* lambda model: torch.optim.SGD\(model.parameters\(\)\)",
        ),
        ({"loss": "mse"}, TypeError, "loss='mse': expected a function of outputs and labels"),
        ({"loss": torch.nn.MSELoss(reduction="sum")}, ValueError, "reduction has to be 'mean'"),
        ({"metrics": {"loss": ranks.absolute}}, ValueError, "metrics has 'loss'"),
        ({"feature_cols": ["x", "z"]}, ValueError, "column 'z' is not in the DataFrame, which has row, x, y"),
        ({"feature_cols": []}, TypeError, r"feature_cols=\[\]: expected names of columns"),
        ({"label_cols": [["y"]]}, TypeError, r"label_cols=\[\['y'\]\]: expected names of columns"),
        ({"batch_size": 0}, ValueError, "batch_size=0: expected 1 or more"),
        ({"epochs": 1.5}, TypeError, "epochs=1.5: expected a whole number"),
        ({"validation": 1.0}, ValueError, "validation=1.0: expected a share between 0 and 1"),
        ({"validation": "y"}, TypeError, "validation='y': the column is of type double: expected a boolean one"),
        ({"store": ""}, TypeError, "store='': expected a directory's path"),
        ({"store": "hdfs://nn/x"}, ValueError, "store='hdfs://nn/x': a checkpoint is a file in a directory: give"),
        ({"prediction_col": ""}, ValueError, "prediction_col='': expected the name of a column"),
        ({"predict": "label"}, ValueError, "predict='label': expected 'output' or 'class'"),
        ({"settings": {"colour": 3}}, (TypeError, ValueError), "colour"),
        ({"num_proc": 9}, ValueError, r"num_proc=9, and Spark runs 3 task\(s\)"),
    ],
)
def test_what_is_refused_before_ranks_start(
    changes: dict[str, Any], error: type[Exception], words: str, spark: SparkContext
) -> None:
    with pytest.raises(error, match=words) as raised:
        estimator(**changes).fit(frame(spark))
    assert "\n" not in str(raised.value)


@local
def test_frames_that_are_refused(spark: SparkContext, monkeypatch: pytest.MonkeyPatch) -> None:
    data = frame(spark)
    with pytest.raises(TypeError, match=r"column 'x' is of type array<string>: features and labels are numbers"):
        estimator().fit(data.withColumn("x", functions.col("x").cast("array<string>")))
    with pytest.raises(TypeError, match=r"column 'y' is of type date: .*cast"):
        estimator().fit(data.withColumn("y", functions.current_date()))
    for wanted in None, 2:
        with pytest.raises(ValueError, match="the DataFrame has no rows"):
            estimator(num_proc=wanted).fit(data.where("false"))
    with pytest.raises(ValueError, match=r"num_proc=3, and the DataFrame has 2 partition\(s\).* repartition\(3\)"):
        estimator().fit(data.coalesce(2))
    with pytest.raises(TypeError, match=r"fit\(\[1, 2\]\): expected a DataFrame"):
        estimator().fit([1, 2])
    exact = data.select("row", "x", functions.expr("cast(row as decimal(9,2)) as y"))
    as_double = data.select("row", "x", functions.expr("cast(row as double) as y"))
    histories = [estimator().fit(one).history for one in (as_double, exact, data.drop("y").selectExpr("*", "row as y"))]
    assert histories == histories[:1] * 3
    model = estimator().fit(data)
    with pytest.raises(ValueError, match="has a column 'y' already"):
        model.copy({model.prediction_col: "y"}).transform(data)
    with pytest.raises(ValueError, match="predict='class': the model gives one number for each row"):
        model.copy({model.predict: "class"}).transform(data)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(mr.MultiringError, match="Spark Connect session"):
        estimator().fit(data)
    for each in model, estimator():
        with pytest.raises(
            mr.MultiringError, match=r"overwrite\(\)\.save\('/there'\): a Spark Connect session cannot replace"
        ):
            each.write().overwrite().save("/there")


@local
@pytest.mark.parametrize(
    ("query", "changes", "error", "words"),
    [
        ("if(row = 25, null, x) as x, y", {}, ValueError, r"column 'x' is null in the row with x=None, y=-?\d"),
        (
            "if(row = 7, array(1, null, 2, 3), x) as x, y",
            {},
            ValueError,
            r"column 'x' has a null in the row with x=\[1.0, None",
        ),
        (
            "if(row = 7, slice(x, 1, 3), x) as x, y",
            {},
            ValueError,
            "column 'x' has not the 4 numbers of the rows before in the",
        ),
        (
            "if(row > 20, slice(x, 1, 3), x) as x, y",
            {},
            ValueError,
            "column 'x' has 3 numbers in the rows of rank 2, and 4 in",
        ),
        (
            "x, y, false as v",
            {"validation": "v"},
            ValueError,
            r"30 of .* 30 row\(s\) are for training and 0 for validation",
        ),
        ("* from {data} where row < 0", {}, ValueError, "the DataFrame has no rows"),
        ("*", {"model": lambda: 3}, TypeError, "the function given as model made a int"),
        ("*", {"optimizer": lambda model: None}, TypeError, "the function given as optimizer made a NoneType"),
        ("*", {"loss": ranks.per_row}, TypeError, r"the loss is of shape \(4, 1\): expected a tensor with one number"),
        ("*", {"model": torch.nn.Flatten(0)}, TypeError, r"the model gives a tensor of shape \(4,\) for 1 row"),
        (
            "x, array(y, 2 * y) as y",
            {},
            ValueError,
            r"mse_loss on outputs of shape \(4, 1\) and labels of \(4, 2\) \(label column\(s\) 'y'\)",
        ),
        (
            "*",
            {"model": ranks.linear(4, 4)},
            ValueError,
            r"mse_loss on outputs of shape \(4, 4\) and labels of \(4,\) .*an output for each label",
        ),
        (
            "*",
            {"metrics": {"error": ranks.flat_and_column}},
            ValueError,
            r"a metric calls sub on tensors of shapes \(4,\) and \(4, 1\) .*index the second",
        ),
        ("*", {"predict": "class"}, ValueError, "predict='class': the model gives one number for each row"),
    ],
)
def test_what_ranks_refuse(
    query: str, changes: dict[str, Any], error: type[Exception], words: str, spark: SparkContext
) -> None:
    selected = query if "{data}" in query else f"{query} from {{data}}"
    data = SparkSession(spark).sql(f"select {selected}", data=frame(spark))
    with pytest.raises(error, match=words) as raised:
        estimator(**changes).fit(data)
    assert "\n" not in str(raised.value)
    assert_nothing_is_left(spark)


@cluster
def test_digits_on_two_executors_of_which_one_is_lost_first(spark: SparkContext, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    rows = [(images[i].tolist(), int(labels[i])) for i in range(len(images))]
    cuts = [0, 700, 700, 760, 1200, 1437]
    parts = [rows[start:stop] for start, stop in itertools.pairwise(cuts)]
    session = SparkSession(spark)
    schema = "image array<float>, digit int"
    data = session.createDataFrame(spark.parallelize(range(5), 5).flatMap(lambda part: parts[part]), schema)
    options = {
        "model": ranks.digits,
        "optimizer": ranks.adam,
        "feature_cols": "image",
        "label_cols": "digit",
        "num_proc": 2,
    }
    fatal = ranks.FatalLoss(tmp_path, 1, 7, executor=True)
    digits = estimator(**options, batch_size=16, epochs=5, loss=fatal, predict="class")
    with pytest.raises(mr.PeerLost) as raised:
        digits.fit(data)
    assert raised.value.rank == 1
    assert "ExecutorLostFailure" in str(raised.value)
    test = session.createDataFrame(rows[1437:], schema)
    together = digits.fit(data).transform(test).where("prediction = digit").count() / 360
    alone = ranks.digits()
    optimizer = ranks.adam(alone)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for epoch in range(5):
        for batch in torch.from_numpy(np.random.default_rng(epoch).permutation(1437)).split(32):
            optimizer.zero_grad()
            functional.cross_entropy(alone(x[batch]), y[batch]).backward()
            optimizer.step()
    one = ranks.accuracy(alone(x[1437:]), y[1437:])
    assert min(one, together) > 0.85
    assert together > one - 0.03
