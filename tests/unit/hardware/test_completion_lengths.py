from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tidemill.core.errors import UserError
from tidemill.hardware.completion_lengths import (
    EmpiricalLengths,
    LogNormalLengths,
    lengths_of,
    lengths_of_run,
    log_normal_of_mean,
    mean_length,
    quantiles,
)


def test_log_normal_lengths() -> None:
    # half are below the median; 95 % below median * exp(0.8 * 1.645) = 3.73 medians
    lengths = LogNormalLengths(median=1000, sigma=0.8, limit=100_000)
    assert lengths.quantile(0.5) == 1000
    assert lengths.quantile(0.95) == pytest.approx(3728, abs=2)
    assert LogNormalLengths(median=1000, sigma=0.8, limit=2000).quantile(0.95) == 2000
    assert LogNormalLengths(median=1, sigma=3, limit=10).quantile(0.01) == 1


def test_a_mean_after_the_cut() -> None:
    found = log_normal_of_mean(4000, sigma=0.8, limit=14_000)
    assert mean_length(found) == pytest.approx(4000, rel=1e-3)
    assert found.median < 4000
    assert mean_length(log_normal_of_mean(9_990, sigma=1.0, limit=10_000)) == pytest.approx(9990, rel=1e-2)
    for sigma in (-1.0, 100.0, float("nan")):
        with pytest.raises(UserError, match="sigma"):
            log_normal_of_mean(100, sigma=sigma, limit=1000)
    with pytest.raises(UserError, match="a mean of"):
        log_normal_of_mean(20_000, sigma=0.8, limit=14_000)


def test_empirical_lengths() -> None:
    lengths = lengths_of([30, 10, 20, 0])
    assert lengths == EmpiricalLengths(tokens=(1, 10, 20, 30))
    assert [lengths.quantile(share) for share in (0.01, 0.3, 0.6, 0.999)] == [1, 10, 20, 30]
    assert mean_length(lengths) == pytest.approx(61 / 4)
    assert quantiles(lengths, 4) == (1, 10, 20, 30)
    assert LogNormalLengths(median=7, sigma=0.0, limit=7).quantile(0.9) == 7


def test_lengths_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    folder.mkdir()
    for number, tokens in enumerate(([1, 2, 3], [1], [])):
        line = json.dumps({"step": number, "token_ids": tokens})
        (folder / f"step_{number}.jsonl").write_text(f"{line}\n", encoding="utf-8")
    assert lengths_of_run(tmp_path).tokens == (1, 3)
    assert lengths_of_run(folder / "step_0.jsonl").tokens == (3,)
    with pytest.raises(UserError, match="no samples"):
        lengths_of_run(tmp_path / "none")


def test_unreadable_samples_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    (tmp_path / "samples").mkdir()
    monkeypatch.setattr("os.listdir", refuse)
    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(PermissionError):
        lengths_of_run(tmp_path)
