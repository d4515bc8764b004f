"""Compiled kernels on their way between machines."""

import os
import tarfile
import time

from bench.gpu_day import cache


def compiled(root, count, size):
    for i in range(count):
        for name in (f"triton/hash{i:03d}/kernel.cubin", f"inductor/{i:03d}/code.py"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(os.urandom(size))


def test_the_cache_travels(tmp_path):
    compiled(tmp_path / "here", 3, 1000)
    assert cache.pack(tmp_path / "here", tmp_path) == []
    assert cache.unpack(tmp_path, tmp_path / "there") == []
    names = lambda root: {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    assert names(tmp_path / "there") == names(tmp_path / "here") and len(names(tmp_path / "there")) == 6


def test_tar_files_are_few_and_small_and_triton_goes_first(tmp_path):
    compiled(tmp_path / "cache", 10, 100_000)
    (note,) = cache.pack(tmp_path / "cache", tmp_path, limit=520_000)
    files = sorted(tmp_path.glob("cache-*"))
    assert len(files) == cache.FILES and all(file.stat().st_size < 520_000 for file in files)
    held = [name for file in files for name in tarfile.open(file).getnames() if name.count("/") == 1]
    assert len(held) == 8 and all(name.startswith("triton/") for name in held) and note.startswith("12 entries")
    assert 2 + cache.FILES <= 8 and cache.SIZE < 16e6 and cache.FILES * cache.SIZE + 2e6 < 64 * 2**20


def test_packing_ends_in_time(tmp_path):
    compiled(tmp_path / "cache", 3, 10)
    (note,) = cache.pack(tmp_path / "cache", tmp_path, until=time.time() - 1)
    assert note.startswith("6 entries")


def test_a_tar_file_that_is_cut_off_is_named_and_leaves_no_part_of_a_file(tmp_path, capsys):
    compiled(tmp_path / "here", 5, 50_000)
    cache.pack(tmp_path / "here", tmp_path)
    path = tmp_path / "cache-0.tar.gz"
    path.write_bytes(path.read_bytes()[:200_000])
    (note,) = cache.unpack(tmp_path, tmp_path / "there")
    assert str(path) in note
    files = [p for p in (tmp_path / "there").rglob("*") if p.is_file()]
    assert files and all(p.stat().st_size == 50_000 for p in files)
    path.write_bytes(b"no tar")
    assert str(path) in cache.unpack(tmp_path, tmp_path / "other")[0]
