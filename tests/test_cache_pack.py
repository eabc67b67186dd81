"""Cache packs: whole, refused where they would not hit, and safe to unpack."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from pathlib import Path

import pytest

from backends import get_backend
from ledger.cache_pack import CachePackError, open_pack, pack, unpack, verify
from ledger.command_line import main
from training.cache_files import files, repair

CPU = get_backend("cpu")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder with three entries, and what is not worth packing."""
    folder = tmp_path / "cache"
    for path, content in {"ab/one.so": b"1" * 5000, "ab/two.py": b"two", "fxgraph/cd/key/three": b"3"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    for path in ("ab/one.so.lock", "ab/header.h.gch", ".hidden", "ab/four.partial"):
        (folder / path).write_bytes(b"x")
    os.symlink("/etc/passwd", folder / "ab" / "link")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path, _ in files(folder)}


def rewrite(file: Path, change) -> None:
    """Let `change` edit the manifest and the files of a pack."""
    with zipfile.ZipFile(file) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(inside["manifest.json"])
    change(manifest, inside)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in (inside | {"manifest.json": json.dumps(manifest).encode()}).items():
            archive.writestr(name, data)


def test_what_is_packed_is_unpacked(cache: Path, tmp_path: Path):
    file = tmp_path / "cache.zip"
    manifest = pack(CPU, cache, file)
    assert [entry.path for entry in manifest.entries] == ["ab/one.so", "ab/two.py", "fxgraph/cd/key/three"]
    assert manifest.conditions["version of torch"] and manifest.conditions["processor features"] and manifest.bytes == 5004
    assert verify(file)[1] == []
    done = unpack(file, CPU, tmp_path / "other")
    assert len(done.written) == 3 and not done.present and not done.damaged
    assert content(tmp_path / "other") == content(cache)
    (tmp_path / "other" / "ab" / "two.py").write_bytes(b"t")
    done = unpack(file, CPU, tmp_path / "other")
    assert (done.written, len(done.present)) == (["ab/two.py"], 2), "what is cut off is put right, what is there stays"
    assert not list(tmp_path.rglob("*.partial")) or set(tmp_path.rglob("*.partial")) == {cache / "ab" / "four.partial"}


@pytest.mark.parametrize(
    ("condition", "value"),
    [("version of torch", "2.12.0"), ("processor features", "0"), ("Python", "3.99"), ("chip", "another")],
)
def test_a_pack_that_would_not_hit_is_refused_by_name(condition: str, value: str, cache: Path, tmp_path: Path, capsys):
    file = tmp_path / "cache.zip"
    pack(CPU, cache, file)
    rewrite(file, lambda manifest, inside: manifest["conditions"].update({condition: value}))
    with pytest.raises(CachePackError, match=f"would not hit here: {condition}: packed with {value}, here "):
        unpack(file, CPU, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert main(["cache", "verify", str(file)]) == 1
    assert f"would not hit here: {condition}: packed with {value}" in capsys.readouterr().out


def test_another_device_or_size_of_logical_core_is_refused(cache: Path, tmp_path: Path, monkeypatch):
    file, neuron = tmp_path / "cache.zip", get_backend("neuron")
    pack(CPU, cache, file)
    with pytest.raises(CachePackError, match="device: packed for cpu, here neuron"):
        unpack(file, neuron, tmp_path / "other")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    pack(neuron, cache, file)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    with pytest.raises(CachePackError, match="LNC: packed with 2, here 1; NEURON_CC_FLAGS: packed with none, here -O1"):
        unpack(file, neuron, tmp_path / "other")


def test_b17_damaged_entries_are_dropped_by_name(cache: Path, tmp_path: Path, capsys):
    file = tmp_path / "cache.zip"
    pack(CPU, cache, file)

    def damage(manifest, inside):
        inside["cache/ab/one.so"] = b"1" * 4999 + b"2"
        inside["cache/ab/two.py"] = b"two and more"
        del inside["cache/fxgraph/cd/key/three"]

    rewrite(file, damage)
    assert verify(file)[1] == ["ab/one.so", "ab/two.py", "fxgraph/cd/key/three"]
    assert main(["cache", "unpack", str(file), "--directory", str(tmp_path / "other")]) == 1
    assert "damaged, dropped: ab/one.so" in capsys.readouterr().out
    assert content(tmp_path / "other") == {} and not list((tmp_path / "other").rglob("*.partial"))


@pytest.mark.parametrize(
    "path", ["../out", "/etc/out", "a/../../out", "a\\..\\out", "C:out", "", "a//b", "./a", ".bashrc", "a/.x"]
)
def test_no_entry_leaves_the_cache(path: str, cache: Path, tmp_path: Path):
    file = tmp_path / "cache.zip"
    pack(CPU, cache, file)
    entry = {"path": path, "bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}

    def add(manifest, inside):
        manifest["entries"].append(entry)
        inside[f"cache/{path}"] = b"x"

    rewrite(file, add)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CachePackError, match="would lie outside of the cache"):
        unpack(file, CPU, tmp_path / "other")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_in_the_cache_is_not_followed_out(cache: Path, tmp_path: Path):
    file, other = tmp_path / "cache.zip", tmp_path / "other"
    pack(CPU, cache, file)
    (tmp_path / "elsewhere").mkdir()
    other.mkdir()
    (other / "ab").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CachePackError, match="a link leads out of the cache"):
        unpack(file, CPU, other)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_link_in_the_pack_is_a_file_with_a_wrong_hash(cache: Path, tmp_path: Path):
    file = tmp_path / "cache.zip"
    pack(CPU, cache, file)
    with zipfile.ZipFile(file) as archive:
        inside = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in inside.items():
            info = zipfile.ZipInfo(name)
            if name.endswith("two.py"):
                info.external_attr, data = 0o120777 << 16, b"/etc/passwd"
            archive.writestr(info, data)
    assert unpack(file, CPU, tmp_path / "other").damaged == ["ab/two.py"]
    assert not any(path.is_symlink() for path in (tmp_path / "other").rglob("*"))


@pytest.mark.parametrize("spoilt", ["cut off", "empty", "no manifest", "newer", "text"])
def test_what_is_no_pack_is_one_line(spoilt: str, cache: Path, tmp_path: Path, capsys):
    file = tmp_path / "cache.zip"
    pack(CPU, cache, file)
    if spoilt == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    elif spoilt == "empty":
        file.write_bytes(b"")
    elif spoilt == "no manifest":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x", b"")
    elif spoilt == "newer":
        rewrite(file, lambda manifest, inside: manifest.update(format=2))
    else:
        file.write_text("hello")
    for command in ("verify", "unpack"):
        assert main(["cache", command, str(file), "--directory", str(tmp_path / "other")]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {file}: ") and said.count("\n") == 1
    with pytest.raises(CachePackError):
        open_pack(file)


def test_packing_an_empty_cache_and_an_unwritable_file(cache: Path, tmp_path: Path, capsys):
    assert main(["cache", "pack", str(tmp_path / "x"), "--directory", str(tmp_path / "nothing")]) == 2
    assert "nothing to pack" in capsys.readouterr().err
    assert main(["cache", "pack", str(tmp_path / "no" / "x"), "--directory", str(cache)]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_stat_and_prune(cache: Path, tmp_path: Path, capsys):
    (cache / "ab" / "empty").touch()
    long_ago = time.time() - 10 * 86_400
    os.utime(cache / "ab" / "two.py", (long_ago, long_ago))
    there = ["--directory", str(cache)]
    assert main(["cache", "stat", *there]) == 0
    said = capsys.readouterr().out
    assert "4 entries" in said and "empty: ab/empty" in said and "oldest 10.0 days" in said
    assert main(["cache", "prune", *there, "--older-than-days", "5"]) == 0
    assert "would remove 1 entries" in capsys.readouterr().out and (cache / "ab" / "two.py").exists()
    assert main(["cache", "prune", *there, "--older-than-days", "5", "--yes"]) == 0
    assert not (cache / "ab" / "two.py").exists() and (cache / "ab" / "one.so").exists()
    assert main(["cache", "prune", *there, "--older-than-days", "-1"]) == 2


def test_b17_a_cache_is_repaired(cache: Path, tmp_path: Path):
    file, other = tmp_path / "cache.zip", tmp_path / "other"
    pack(CPU, cache, file)
    unpack(file, CPU, other)
    assert repair(other) == []
    (other / "ab" / "one.so").write_bytes(b"1" * 100)
    (other / "ab" / "new.so").touch()
    assert repair(other) == ["ab/one.so"], "an empty file that is being written is left alone"
    (other / "ab" / "one.so").write_bytes(b"1" * 99)
    os.utime(other / "ab" / "new.so", (0, 0))
    assert repair(other) == ["ab/new.so"], "what was compiled in the place of an unpacked entry has a length of its own"
    assert repair(tmp_path / "nowhere") == []
