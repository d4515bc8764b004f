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


def test_tar_files_are_few_and_small_and_the_oldest_of_triton_go_first(tmp_path):
    compiled(tmp_path / "cache", 10, 100_000)
    for i in range(10):
        os.utime(tmp_path / f"cache/triton/hash{i:03d}", (1e9 - i, 1e9 - i))  # the last is the oldest
    (note,) = cache.pack(tmp_path / "cache", tmp_path, limit=520_000)
    files = sorted(tmp_path.glob("cache-*"))
    assert len(files) == cache.FILES and all(file.stat().st_size < 520_000 for file in files)
    held = [name for file in files for name in tarfile.open(file).getnames() if name.count("/") == 1]
    assert held == [f"triton/hash{i:03d}" for i in (*range(9, 3, -1),)] and note.startswith("14 entries")
    assert 2 + cache.FILES <= 8 and cache.SIZE < 16e6


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
