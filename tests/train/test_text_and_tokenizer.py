import json
from pathlib import Path

import pytest
from harness.crashing import disk_or_skip
from harness.ranks import ranks, run_on_ranks

from mics_dtensor.train.text import CHARS_PER_DOCUMENT, python_docs

tokenizer = pytest.importorskip("mics_dtensor.train.tokenizer")


def test_the_documents_are_the_topics_cut_and_mixed() -> None:
    from pydoc_data.topics import topics

    documents = python_docs()
    assert sum(map(len, documents)) == sum(map(len, topics.values()))
    assert sorted(documents) == sorted(
        piece for piece in documents if any(piece in topic for topic in topics.values())
    )
    assert sorted(map(len, documents))[len(documents) // 2] <= CHARS_PER_DOCUMENT
    assert documents == python_docs()


def test_a_word_comes_back_as_it_was(tmp_path: Path) -> None:
    built = tokenizer.BuiltInTokenizer.Config(cache_dir=str(tmp_path)).build(tokenizer_path="")
    assert built.get_vocab_size() <= tokenizer.VOCAB_SIZE
    for text in ["The assert statement\n\n   x = [1]", "nothing like Python: żółw 龜 🐢"]:
        assert built.decode(built.encode(text)) == text


def test_training_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    documents = python_docs()[:40]
    for folder in (tmp_path / "one", tmp_path / "two"):
        tokenizer.train_once(documents, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_trained_tokenizer_is_not_trained_again(tmp_path: Path) -> None:
    tokenizer.train_once(python_docs()[:5], tmp_path)
    (tmp_path / "tokenizer.json").write_text("as it was")
    tokenizer.train_once(python_docs()[:5], tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "as it was"


def test_another_text_has_another_folder(tmp_path: Path) -> None:
    documents = python_docs()
    assert tokenizer.folder_of(documents, tmp_path) != tokenizer.folder_of(documents[1:], tmp_path)


def test_a_crash_while_writing_leaves_no_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(descriptor: int) -> None:
        raise OSError(f"disk full, descriptor {descriptor}")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="disk full"):
        tokenizer.write_atomically(tmp_path / "tokenizer.json", json.dumps([1, 2, 3]))
    assert list(tmp_path.iterdir()) == []


@ranks(3)
def test_one_rank_trains_and_the_others_read_it(tmp_path: Path) -> None:
    import torch.distributed as dist

    trained = []
    train_once = tokenizer.train_once

    def watched(documents: list[str], folder: Path) -> None:
        if not (folder / "tokenizer.json").exists():
            trained.append(dist.get_rank())
        train_once(documents, folder)

    tokenizer.train_once = watched
    built = tokenizer.BuiltInTokenizer.Config(cache_dir=str(tmp_path)).build(tokenizer_path="")
    assert trained == ([0] if dist.get_rank() == 0 else [])
    assert built.get_vocab_size() == tokenizer.VOCAB_SIZE


def test_a_full_disk_is_told_by_every_rank_at_once() -> None:
    from mics_dtensor.errors import ConfigError

    with disk_or_skip(1 << 15) as folder:

        def body() -> None:
            config = tokenizer.BuiltInTokenizer.Config(cache_dir=str(folder / "tokenizer"))
            with pytest.raises(ConfigError, match=r"cannot be written to .*No space left on dev"):
                tokenizer.readable(config, "")

        run_on_ranks(2, body, timeout_s=60)
