"""Certificates: fingerprints of weights, and what a file may contain."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from titan_core.api import UserError
from titan_debug.certificate import fingerprints
from titan_debug.certificate.certify import digest_of_code
from titan_debug.certificate.contents import (
    PROJECTIONS,
    Certificate,
    Fingerprint,
    OnMesh,
    Recorded,
    differences,
    digest_of_contents,
    read_certificate,
    unequal,
)
from titan_debug.certificate.fingerprints import fingerprint


def of(tensor: torch.Tensor) -> Fingerprint:
    return fingerprint(tensor, tensor.shape, (0,) * tensor.dim())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(5, 7), (11,), (3, 4, 5)])
def test_the_fingerprints_of_shards_add_up(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = of(whole)
    monkeypatch.setattr(fingerprints, "_AT_ONCE", 4)
    for dim, size in enumerate(shape):
        shards = [whole.narrow(dim, begin, min(2, size - begin)) for begin in range(0, size, 2)]
        places = [tuple(2 * number if axis == dim else 0 for axis in range(len(shape))) for number in range(len(shards))]
        one, *rest = (fingerprint(shard, whole.shape, place) for shard, place in zip(shards, places, strict=True))
        for other in rest:
            one += other
        assert (one.checksum, one.shape, one.dtype) == (expected.checksum, shape, expected.dtype)
        assert one.projections == pytest.approx(expected.projections) and one.squares == pytest.approx(expected.squares)


def test_scalars_and_what_a_checksum_sees() -> None:
    assert of(torch.tensor(2.0)) == of(torch.tensor(2.0)) != of(torch.tensor(3.0))
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    changed = {
        "transposed": weight.T,
        "two rows swapped": weight[[1, 0, *range(2, 8)]],
        "negated": -weight,
        "one bit": torch.where(torch.arange(64).view(8, 8) == 37, torch.nextafter(weight, weight + 1), weight),
    }
    sums = {of(tensor.contiguous()).checksum for tensor in (weight, weight.clone(), *changed.values())}
    assert len(sums) == 1 + len(changed)
    assert len({of(weight).projections, of(weight.T.contiguous()).projections}) == 2


def test_projections_estimate_distances() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        one, two = torch.randn(2, 40, 30, generator=generator)
        other = one + 1e-4 * two
        assert 0.5 < of(one).distance(of(other)) / math.dist(one.flatten().tolist(), other.flatten().tolist()) < 1.7


def test_differences_are_relative_to_the_update() -> None:
    generator = torch.Generator().manual_seed(4)
    before = {name: torch.randn(20, 20, generator=generator) for name in ("trained", "hardly", "never")}
    update = torch.randn(20, 20, generator=generator)
    after = {"trained": before["trained"] + update, "hardly": before["hardly"] + 1e-7 * update, "never": before["never"]}
    peer = {**after, "trained": after["trained"] + 0.1 * update, "hardly": before["hardly"]}
    found = {
        name: value
        for value, name in differences(*({name: of(one) for name, one in each.items()} for each in (before, after, peer)))
    }
    assert found["trained"] == pytest.approx(0.1, rel=1e-3) and 0 < found["hardly"] < 1e-4 and found["never"] == 0
    weights = {name: of(one) for name, one in before.items()}
    assert unequal(weights, dict(weights)) == ""
    assert unequal(weights, {**weights, "hardly": weights["never"]}) == "hardly"
    assert unequal(weights, {"trained": weights["trained"]}) == "hardly"


def certificate() -> Certificate:
    weights = Fingerprint(shape=(2,), dtype="float32", checksum="0" * 16, squares=1.0, projections=(0.5,) * PROJECTIONS)
    return Certificate(
        made="2026-01-01T00:00:00+00:00", recipe="tiny", steps=2, global_batch_size=4, losses={1: 2.0, 2: 1.5},
        meshes={"tp=2": OnMesh(losses=1e-7, gradients=1e-8, gradient="w", weights=1e-6, weight="w", tolerance=1e-4)},
        config={"optimizer.lr": 1e-3}, code={"torch": "2.12"}, data="ab",
        weights=Recorded(first=0, step=2, device="cpu", before={"w": weights}, after={"w": weights}),
    )  # fmt: skip


WEIGHTS = certificate().weights.model_dump(mode="json")


def test_a_certificate_is_read_as_written(tmp_path: Path) -> None:
    file = tmp_path / "new/certificate.json"
    certificate().write(file)
    assert read_certificate(file) == certificate()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: (Not a directory|File exists)"):
        certificate().write(tmp_path / "file/certificate.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.5", "1.4", "was changed after it was written"),
        ('"certificate"', '"licence"', "is no certificate"),
        ("{", "[", "is not JSON"),
    ],
)
def test_a_changed_certificate_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "certificate.json"
    certificate().write(file)
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        read_certificate(file)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 2, r"version: Input should be less than or equal to 1"),
        ("steps", "2", "steps: Input should be a valid integer"),
        ("unknown", 1, "unknown: Extra inputs are not permitted"),
        ("meshes", {}, "meshes: Dictionary should have at least 1 item"),
        ("losses", {}, "losses: Dictionary should have at least 1 item"),
        ("weights", {**WEIGHTS, "after": {}}, "weights: .*before and after are of different parameters"),
        ("weights", {**WEIGHTS, "before": {}, "after": {}}, "weights.before: Dictionary should have at least 1 item"),
    ],
)
def test_a_certificate_of_another_form_is_refused(tmp_path: Path, key: str, value: object, message: str) -> None:
    file = tmp_path / "certificate.json"
    contents = {**certificate().model_dump(mode="json"), key: value}
    file.write_text(json.dumps({"sha256": digest_of_contents(contents), "certificate": contents}))
    with pytest.raises(UserError, match=message):
        read_certificate(file)


def test_the_digest_of_code_follows_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "certified_code"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner/module.py").write_text("one = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    (before,) = digest_of_code("certified_code")
    (package / "inner/module.py").write_text("one = 2\n")
    (after,) = digest_of_code("certified_code")
    assert len(before) == len(after) == 16 and before != after
    assert list(digest_of_code("no_such_package")) == []
