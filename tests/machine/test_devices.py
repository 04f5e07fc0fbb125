import pytest

from moe_lab.machine import devices as module
from moe_lab.machine.devices import Device, Figure, Roof, device, devices, reported_as
from moe_lab.machine.timing import measurements
from moe_lab.problem.contract import data_dir
from moe_lab.problem.errors import DataError


def test_the_limits_of_a_c500_block():
    c500 = device("C500")
    assert c500.shared_per_block_bytes == 64 * 1024
    assert c500.registers_per_thread == 256
    assert c500.threads_per_processor == 2048
    assert c500.lanes == 64
    assert c500.processors == 104


def test_no_roof_that_was_recorded_on_an_h200_beats_its_measured_roof():
    recorded = [row for row in measurements() if row.kind == "roof" and row.device == "NVIDIA H200"]
    roof = device("h200").roof("measured")
    assert max(row.rate_tflops for row in recorded) <= roof.peak_tflops * 1.001
    assert max(row.rate_gbps for row in recorded) <= roof.bandwidth_tbps * 1001
    assert len(recorded) > 20


def test_a_roof_takes_the_upper_end_of_a_range_and_says_where_it_is_from():
    assert device("h200").roof("measured") == Roof("NVIDIA H200 SXM, measured", 784, 4.31, "measured")
    assert device("c500").roof() == Roof("MetaX C500, specification", 280, 1.843, "specification")


@pytest.mark.parametrize("basis", ["measured", "observed"])
def test_what_was_seen_on_a_slice_is_no_roof(basis):
    assert device("c500").figure("peak_fp16_tflops", "observed").high == 115
    with pytest.raises(DataError, match="MetaX C500, expected specification"):
        device("c500").roof(basis)


def test_a_device_is_found_by_what_its_driver_reports():
    assert device("NVIDIA H200").name == "h200"
    assert device(" nvidia geforce rtx 4090 ").name == "rtx4090"
    with pytest.raises(DataError, match="got device 'H20', expected one of c500, h200"):
        device("H20")


def test_every_figure_has_a_source_and_every_gpu_its_limits():
    for item in devices().values():
        assert all(figure.source for figure in item.figures)
        if item.kind == "gpu":
            limits = [name for name, value in vars(Device).items() if isinstance(value, module._Limit)]
            assert len(limits) > 8
            assert min(getattr(item, name) for name in limits if "reserved" not in name) > 0
            assert item.shared_per_block_bytes <= item.shared_per_processor_bytes
            assert item.lanes in (32, 64)
            assert 0.5 < item.roof().ridge < 1000


def test_where_only_a_gpu_will_do_no_cpu_is_offered():
    assert device("C500", "gpu").name == "c500"
    with pytest.raises(DataError, match=r"^got device 'laptop', a CPU, expected a GPU: c500, h200,") as wrong:
        device("laptop", "gpu")
    with pytest.raises(DataError, match=r"^got device 'abacus', expected one of c500, h200,") as unknown:
        device("abacus", "gpu")
    for caught in (wrong, unknown):
        assert "laptop" not in str(caught.value).partition("expected")[2]


def test_a_cpu_has_no_block_limits():
    with pytest.raises(DataError, match="a cpu has no such limit"):
        _ = device("laptop").shared_per_block_bytes


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "device_figures.csv",
            "",
            "c500,processors,specification,1,1,somebody,\n",
            "got c500 processors specification a",
        ),
        ("device_figures.csv", "\nh200,lanes,", "\nh100,l2_bytes,", "a second time"),
        ("device_figures.csv", "\nh200,lanes,", "\nc5000,lanes,", "got c5000, expected keys of devices.csv"),
        ("devices.csv", "\nh200,", "\nc500,", "devices.csv, line 3: got c500 a second time"),
    ],
)
def test_a_damaged_table_is_named(tmp_path, monkeypatch, file, old, new, message):
    for name in ("devices.csv", "device_figures.csv"):
        text = (data_dir() / name).read_text(encoding="utf-8")
        if name == file:
            assert old in text
            text = text.replace(old, new, 1) if old else text + new
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(module, "data_dir", lambda: tmp_path)
    with pytest.raises(DataError, match=message):
        devices.__wrapped__()


def test_an_upside_down_range_is_refused():
    with pytest.raises(ValueError, match="expected 0 <= low <= high"):
        Figure("x", "lanes", "specification", 2, 1, "somebody", None)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", None),
        ("MXC500", "c500"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", "laptop"),
        ("Some Processor", None),
    ],
)
def test_a_driver_s_name_is_that_device_and_no_other(text, name):
    found = reported_as(text)
    assert (found.name if found else None) == name
