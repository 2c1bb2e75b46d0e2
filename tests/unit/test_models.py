"""Models against their known sizes, recordings against files, machines against their sources."""

from __future__ import annotations

import json

import pytest

from multiring.simulate.machines import MACHINES, machine
from multiring.simulate.models import MODELS, model
from multiring.simulate.recording import Gradient, RecordedBucket, Recording, buckets, load, save

PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "wide-resnet50": 68_883_240,
    "vgg16": 138_357_544,
    "bert-base": 109_482_240,
}
"""Parameters, as the reference implementations count them."""

GIGAFLOPS = {"resnet50": 4.09, "resnet101": 7.80, "resnet152": 11.51, "wide-resnet50": 11.40, "vgg16": 15.47}
"""Products of a forward pass in billions, as published."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_that_are_known(name):
    assert model(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", GIGAFLOPS)
def test_operations_are_those_that_are_known(name):
    assert model(name).flops / 3 / 2e9 == pytest.approx(GIGAFLOPS[name], abs=0.01)


def test_more_classes_are_a_larger_classifier():
    classifiers = [model(name).layers[-1].parameters for name in ("resnet101", "resnet101-22k")]
    assert classifiers == [2049 * 1000, 2049 * 22000]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("itemsize", [4, 2])
def test_a_recording_has_all_gradients_and_the_whole_step(name, itemsize):
    recording = model(name).recording(samples=32, samples_a_second=200, itemsize=itemsize)
    assert recording.nbytes == itemsize * model(name).parameters
    assert recording.forward == pytest.approx(32 / 200 / 3)
    assert recording.seconds == pytest.approx(32 / 200)


def test_backward_begins_with_the_last_layer():
    recording = model("vgg16").recording(samples=1, samples_a_second=1)
    assert [gradient.nbytes for gradient in recording.gradients[:3]] == [
        4 * 4097 * 1000,
        4 * 4097 * 4096,
        4 * 25089 * 4096,
    ]
    by_layer = {layer.name: layer.flops for layer in model("vgg16").layers}
    first, third = recording.gradients[0].seconds, recording.gradients[2].seconds
    assert third / first == pytest.approx(by_layer["classifier.0"] / by_layer["classifier.2"])


def test_buckets_close_before_they_outgrow_their_limit():
    recording = Recording("r", 1.0, tuple(Gradient(nbytes, 0.5) for nbytes in (4, 9, 1, 6, 30, 2)))
    assert buckets(recording, (5, 10)) == [
        RecordedBucket(4, 1.5),
        RecordedBucket(10, 2.5),
        RecordedBucket(6, 3.0),
        RecordedBucket(30, 3.5),
        RecordedBucket(2, 4.0),
    ]
    assert buckets(recording, (1000,)) == [RecordedBucket(52, 4.0)]


def test_a_recording_survives_its_file(tmp_path):
    recording = model("resnet50").recording(32, 195.0)
    save(recording, tmp_path / "job.json")
    assert load(tmp_path / "job.json") == recording


def test_an_empty_recording_says_what_it_lacks(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    with pytest.raises(ValueError, match=r"job\.json: a recording is an object of name, .*, not of nothing$"):
        load(tmp_path / "job.json")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"gradients": []}, "list of pairs"),
        ({"gradients": [[4]]}, r"gradient 0 is \[4\]; it must be a pair"),
        ({"gradients": [[4, 0.1], [0, 0.1]]}, "gradient 1 has 0 bytes"),
        ({"gradients": [[4, -1]]}, "gradient 0 takes -1 seconds"),
        ({"forward": "fast"}, "forward takes 'fast' seconds"),
        ({"name": ""}, "name is ''"),
        ({"name": "\x1b[31mred"}, r"name is '\\x1b\[31mred'; it must be text without control characters"),
        ({"loss": 1}, "not of 'name', 'forward', 'gradients', 'loss'$"),
        ({"\x1b[31m": 1}, r"'gradients', '\\x1b\[31m'$"),
        (
            {"forward": int("1" + 400 * "0")},
            r"forward takes 1000+\.\.\. seconds; it must be .* from 0 to 1e\+12$",
        ),
        ({"forward": 1e308}, r"forward takes 1e\+308 seconds"),
        ({"forward": float("nan")}, "forward takes nan seconds"),
        ({"gradients": [[4, 0.1], [10**13, 0.1]]}, "gradient 1 has 10000000000000 bytes"),
        ({"gradients": [[6 * 10**11, 0.1]] * 2}, r"the whole step has 1\.2e\+12 bytes; it must be at most 1e\+12$"),
        ({"forward": 6e11, "gradients": [[4, 6e11]]}, r"the whole step has 1\.2e\+12 seconds"),
    ],
)
def test_a_wrong_recording_names_the_file_and_the_fault(tmp_path, change, fault):
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"name": "r", "forward": 0.1, "gradients": [[4, 0.1]], **change}))
    with pytest.raises(ValueError, match=f"job.json: .*{fault}"):
        load(path)


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_of_a_machine_has_a_source_and_a_year(name):
    for what, figure in machine(name).figures().items():
        assert figure.value > 0, what
        assert len(figure.source) > 10, what
        assert 2010 <= figure.year <= 2026, what


def test_machines_make_topologies():
    minsky = machine("minsky").topology(3)
    assert minsky.levels == ("rank", "host")
    assert minsky.hosts == ("minsky0",) * 4 + ("minsky1",) * 4 + ("minsky2",) * 4
    assert minsky.places[0].link.up == pytest.approx(2 * 12.1e9)
    sites = machine("two-sites").topology(4)
    assert [len(list(site.ranks())) for site in sites.places] == [4, 4]
    assert sites.places[0].link.latency == 13e-3
    with pytest.raises(ValueError, match="3 hosts are not equally many at 2 sites"):
        machine("two-sites").topology(3)
    with pytest.raises(ValueError, match="hosts is 0"):
        machine("minsky").topology(0)


def test_speeds_that_nobody_measured_follow_from_operations():
    minsky = machine("minsky")
    assert minsky.speed(model("vgg16")) == 144
    resnet101, resnet152 = model("resnet101"), model("resnet152")
    assert minsky.speed(resnet101) == pytest.approx(82.7 * resnet152.flops / resnet101.flops)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="unknown model 'resnet-50'; known are resnet50, resnet101"):
        model("resnet-50")
    with pytest.raises(ValueError, match="unknown machine 'cray'; known are minsky"):
        machine("cray")
