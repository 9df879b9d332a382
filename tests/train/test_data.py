import json
from dataclasses import replace
from pathlib import Path

import pytest

from mics_dtensor.errors import ConfigError
from mics_dtensor.train import data
from mics_dtensor.train.config import RunConfig
from mics_dtensor.train.key import replace_at
from mics_dtensor.train.known import DATA_SETS

pytest.importorskip("torchtitan")
# 2026-11: torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

TEXTS = [f"Document {n} speaks of the number {n} and of nothing else." * 3 for n in range(12)]


def config(tmp_path: Path, *, dataset: str = "python_docs", path: Path | None = None) -> RunConfig:
    made = replace_at(RunConfig(), "job.dump_folder", str(tmp_path))
    made = replace_at(made, "model.hf_assets_path", "")
    made = replace_at(made, "training.dataset", dataset)
    return replace_at(made, "training.dataset_path", None if path is None else str(path))


def write(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / f"text{kind}"
    if kind == ".jsonl":
        path.write_text("".join(json.dumps({"text": t, "n": 1}) + "\n" for t in TEXTS))
    elif kind == ".txt":
        path.write_text("\n\n".join(TEXTS))
    else:
        import pyarrow as arrow
        import pyarrow.parquet as parquet

        table = arrow.table({"text": TEXTS, "url": ["-"] * len(TEXTS)})
        parquet.write_table(table, path)
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's cache of what it read, so that a test leaves nothing behind."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return


def loader(made: RunConfig, *, rank: int = 0, num_ranks: int = 4, seq_len: int = 16):  # noqa: ANN201
    tokenizer = data.tokenizer_config(made).build(tokenizer_path="")
    return tokenizer, data.dataloader_config(made).build(
        dp_world_size=num_ranks,
        dp_rank=rank,
        tokenizer=tokenizer,
        seq_len=seq_len,
        local_batch_size=2,
    )


@pytest.mark.parametrize("kind", sorted(data.READERS))
def test_every_rank_reads_other_documents_of_a_local_file(tmp_path: Path, kind: str) -> None:
    made = config(tmp_path, path=write(tmp_path, kind))
    data.check_data(made, num_readers=4)
    seen = []
    for rank in range(4):
        tokenizer, batches = loader(made, rank=rank)
        inputs, _ = next(iter(batches))
        seen.append(tokenizer.decode(inputs["input"][0].tolist()))
    first = [f"Document {n}" for n in (0, 3, 6, 9)]
    assert [text[: len(word)] for text, word in zip(seen, first, strict=True)] == first


def test_labels_are_the_inputs_one_token_on(tmp_path: Path) -> None:
    _, batches = loader(config(tmp_path), seq_len=32)
    inputs, labels = next(iter(batches))
    assert inputs["input"].shape == labels.shape == (2, 32)
    same = inputs["input"][:, 1:] == labels[:, :-1]
    starts = inputs["positions"][:, 1:] == 0  # a label never is the next document's first token
    assert bool((same | starts).all())


def test_a_loader_goes_on_where_its_state_was_taken(tmp_path: Path) -> None:
    _, batches = loader(config(tmp_path))
    reading = iter(batches)
    for _ in range(3):
        next(reading)
    state = batches.state_dict()
    expected = next(reading)
    _, again = loader(config(tmp_path))
    again.load_state_dict(state)
    got = next(iter(again))
    assert got[1].tolist() == expected[1].tolist()


def test_lines_of_a_text_without_blank_lines_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(TEXTS))
    made = config(tmp_path, path=path)
    data.check_data(made, num_readers=12)
    with pytest.raises(ConfigError, match="holds 12 documents, fewer than the 13"):
        data.check_data(made, num_readers=13)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.jsonl", None, r"gone.jsonl' does not exist; name a .jsonl, .txt, .parquet file"),
        ("gone/", None, r"'gone/'|does not exist"),
        ("none.jsonl", b"", r"none.jsonl' is empty; it must hold at least 2 documents"),
        ("one.jsonl", b'{"text": "a"}\n', r"holds 1 documents, fewer than the 2 data-parallel"),
        ("not.jsonl", b'{"text": "a"}\n{"text"', r"line 2, is not JSON"),
        ("key.jsonl", b'{"txt": "a"}\n', r'line 1, is not an object with a string "text"'),
        ("latin.txt", "caf\xe9\nb".encode("latin-1"), r"is not UTF-8 text"),
        ("blank.txt", b"\n\n \n\n", r"holds 0 documents"),
        ("not.parquet", b"PAR0 nothing", r"is not a Parquet file"),
        ("words.csv", b"text\na\n", r"file of unknown kind; its name must end in one of .jsonl"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as refusal:
        data.check_data(config(tmp_path, dataset="c4_test", path=path), num_readers=2)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ('{"text": null}', r'line 13, is not an object with a string "text"'),
        ('{"text": 3}', r'line 13, is not an object with a string "text"'),
        ('{"txt": "a"}', r'line 13, is not an object with a string "text"'),
        ('["text"]', r'line 13, is not an object with a string "text"'),
        ('{"tex', r"line 13, is not JSON"),
    ],
)
def test_a_fault_far_down_is_refused_with_its_line(tmp_path: Path, last: str, words: str) -> None:
    path = write(tmp_path, ".jsonl")
    with path.open("a") as file:
        file.write(last + "\n")
    made = config(tmp_path, path=path)
    data.check_data(made, num_readers=2)  # which reads two documents
    with pytest.raises(ConfigError, match=words) as refusal:
        loader(made)
    assert "\n" not in str(refusal.value)


def test_what_looks_like_a_time_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "days.jsonl"
    path.write_text("".join(json.dumps({"text": f"2026-12-0{n}"}) + "\n" for n in range(1, 9)))
    tokenizer, batches = loader(config(tmp_path, path=path), num_ranks=1)
    inputs, _ = next(iter(batches))
    assert "2026-12-01" in (read := tokenizer.decode(inputs["input"][0].tolist()))
    assert "00:00" not in read


def test_a_parquet_file_without_text_is_refused(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(arrow.table({"content": ["a", "b"]}), path)
    with pytest.raises(ConfigError, match=r"has the columns \['content'\]"):
        data.check_data(config(tmp_path, path=path), num_readers=2)


def test_an_unknown_data_set_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'pile' is not known; choose from c4, .*python_docs"):
        data.check_data(config(tmp_path, dataset="pile"), num_readers=2)


def test_the_data_sets_that_explain_knows_are_those_of_the_registry() -> None:
    from torchtitan.hf_datasets.text_datasets import DATASETS

    data.register()
    assert sorted({*DATASETS} - {data.LOCAL_FILE}) == sorted(DATA_SETS)


def test_a_folder_of_torchtitans_own_repository_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="'tests/assets/c4_test', which does not exist"):
        data.check_data(config(tmp_path, dataset="c4_test"), num_readers=2)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    made = replace_at(config(tmp_path), "model.hf_assets_path", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"none' holds no tokenizer.json"):
        data.check_data(made, num_readers=2)


def test_the_validation_set_is_checked_where_it_is_used(tmp_path: Path) -> None:
    made = config(tmp_path)
    validation = replace(made.validation, dataset="python_docs", dataset_path="gone.txt")
    data.check_data(replace(made, validation=validation), num_readers=2)
    with pytest.raises(ConfigError, match=r"validation.dataset_path 'gone.txt' does not exist"):
        data.check_data(replace(made, validation=replace(validation, enable=True)), num_readers=2)
