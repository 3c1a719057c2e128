from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.errors import UserError
from tidemill.hardware.gpu_catalog import load_catalog
from tidemill.hardware.sky_catalog import catalog_file, read_offers

# The columns of SkyPilot's catalogue v8 for AWS, with prices made up.
ROWS = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone
p5.48xlarge,H100,8.0,192.0,2048.0,,60.5,21.25,us-east-1,us-east-1a
p5.48xlarge,H100,8.0,192.0,2048.0,,55.04,30.5,us-west-2,us-west-2a
g6e.48xlarge,L40S,8.0,192.0,1536.0,,30.13,,us-east-1,us-east-1a
m5.large,,,2.0,8.0,,0.1,0.04,us-east-1,us-east-1a
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".sky/catalogs/v8/aws/vms.csv"
    path.parent.mkdir(parents=True)
    path.write_text(ROWS, encoding="utf-8")
    return path


def test_machines_get_the_lowest_price_of_any_region(file: Path) -> None:
    machines = load_catalog(file).machines
    h100, l40s = machines["aws-p5.48xlarge"], machines["aws-g6e.48xlarge"]
    assert (h100.usd_per_hour, h100.preemptible_usd_per_hour) == (55.04, 21.25)
    assert (l40s.usd_per_hour, l40s.preemptible_usd_per_hour) == (30.13, None)
    assert "SkyPilot" in h100.price_source
    built_in = load_catalog().machines
    assert built_in["aws-p5.48xlarge"].usd_per_hour == 98.32
    assert machines["rlboost-8xh100"] == built_in["rlboost-8xh100"]


def test_offers(file: Path) -> None:
    first, *_, last = read_offers(file)
    assert (first.machine, first.accelerator, first.accelerators, first.region) == (
        "p5.48xlarge",
        "H100",
        8,
        "us-east-1",
    )
    assert (last.accelerator, last.accelerators) == ("", 0)


def test_the_newest_catalogue_is_read(file: Path) -> None:
    newer = file.parents[2] / "v10/aws/vms.csv"
    newer.parent.mkdir(parents=True)
    newer.touch()
    assert catalog_file("aws") == newer
    assert catalog_file("gcp") is None


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ROWS.replace("60.5", "cheap"), None])
def test_another_file(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "other.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="is not a catalogue of SkyPilot"):
        load_catalog(path)
