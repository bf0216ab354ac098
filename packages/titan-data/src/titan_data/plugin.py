"""The components that titan-data contributes."""

from __future__ import annotations

from typing import Any, Final

from titan_core.api import Command, Dataset, HealthCheck, ModelHub, Ref, Tokenizer, hookimpl
from titan_data.chat.config import ChatSection
from titan_data.foreign.config import FlatTokensSection, InputIdsSection, MdsSection

api = (1, 0)

FOREIGN: Final = (
    ("megatron", "token ids of Megatron-LM: a .bin and an .idx file", None),
    ("mds", "token ids of MosaicML's streaming: a folder with index.json", MdsSection),
    ("datatrove", "token ids of datatrove, for nanotron: .ds files", None),
    ("flat_tokens", "files of token ids without an index: nanoGPT, llm.c, OLMo, numpy.save", FlatTokensSection),
)
"""Files of token ids of other tools: name (a key of ``titan_data.foreign.formats.FORMATS``), summary and section."""


@hookimpl
def titan_datasets() -> list[Dataset]:
    files = "titan_data.local_files:check_files"
    records, hub = "titan_data.record_files:open_local", "titan_data.huggingface:open_hub"
    return [
        *(
            Dataset(name=name, summary=summary, build=Ref(opener), check=Ref(files), splits=True)
            for name, summary, opener in (
                ("json", "local JSON lines", records),
                ("text", "local text files", "titan_data.text_files:open_text"),
            )
        ),
        *(
            Dataset(
                name=name,
                summary=summary,
                build=Ref(records),
                check=Ref("titan_data.record_files:check_tables"),
                describe=Ref("titan_data.record_files:describe_tables"),
                splits=True,
            )
            for name, summary in (("parquet", "local Parquet files"), ("arrow", "local Arrow files"))
        ),
        Dataset(
            name="csv",
            summary="local CSV and TSV files",
            build=Ref("titan_data.csv_files:open_csv"),
            check=Ref("titan_data.csv_files:check_csv"),
            splits=True,
        ),
        Dataset(
            name="tokenized",
            summary="token ids on disk, memory-mapped (`titan data tokenize`)",
            build=Ref("titan_data.tokenized:open_tokenized"),
            check=Ref("titan_data.tokenized:check_tokenized"),
            holds_tokens=True,
        ),
        *(
            Dataset(
                name=name,
                summary=summary,
                config=section,
                build=Ref("titan_data.foreign.formats:open_tokens"),
                check=Ref("titan_data.foreign.formats:check_tokens"),
                describe=Ref("titan_data.foreign.formats:describe_tokens"),
                holds_tokens=True,
            )
            for name, summary, section in FOREIGN
        ),
        Dataset(
            name="input_ids",
            summary="records with a column of token ids: Parquet, Arrow, JSON or the hub",
            config=InputIdsSection,
            build=Ref("titan_data.foreign.input_ids:open_input_ids"),
            check=Ref("titan_data.foreign.input_ids:check_input_ids"),
            describe=Ref("titan_data.foreign.input_ids:describe_input_ids"),
            holds_tokens=True,
            splits=True,
        ),
        Dataset(
            name="chat",
            summary="chats, or prompts and completions, for fine-tuning: JSON, Parquet, Arrow, CSV or the hub",
            config=ChatSection,
            build=Ref("titan_data.chat.source:open_chats"),
            check=Ref("titan_data.chat.source:check_chats"),
            describe=Ref("titan_data.chat.source:describe_chats"),
            splits=True,
            tokenizes=True,
        ),
        *(
            Dataset(name=name, summary=summary, build=Ref(hub), check=Ref("titan_data.local_files:check_hub"), splits=True)
            for name, summary in (
                ("hub", "any dataset on the Hugging Face hub, streamed"),
                ("c4", "C4 (allenai/c4, en), streamed"),
                ("c4_validation", "C4's validation split, streamed"),
            )
        ),
    ]


@hookimpl
def titan_tokenizers() -> list[Tokenizer]:
    return [
        Tokenizer(
            name="hf",
            summary="a Hugging Face tokenizer.json",
            build=Ref("titan_data.tokenizers.hugging_face:build"),
        ),
    ]


@hookimpl
def titan_model_hubs() -> list[ModelHub]:
    locate = Ref[Any]("titan_data.model_hub:locate")
    describe = Ref[Any]("titan_data.model_hub:describe")
    return [ModelHub(name="huggingface", summary="models of the Hugging Face hub", locate=locate, describe=describe)]


@hookimpl
def titan_health_checks() -> list[HealthCheck]:
    return [
        HealthCheck(
            name="downloads",
            summary="whether the Hugging Face Hub answers",
            check=Ref("titan_data.health:check"),
            slow=True,
        ),
    ]


@hookimpl
def titan_commands() -> list[Command]:
    return [
        Command(
            name="data inspect",
            group="data and models",
            summary="show the first sequences that a recipe trains on",
            arguments=Ref("titan_data.cli.data_inspect:arguments"),
            run=Ref("titan_data.cli.data_inspect:run"),
            overrides=True,
        ),
        Command(
            name="data step",
            group="data and models",
            summary="list the documents that a step of a run used",
            arguments=Ref("titan_data.cli.data_step:arguments"),
            run=Ref("titan_data.cli.data_step:run"),
            overrides=True,
        ),
        Command(
            name="data where",
            group="data and models",
            summary="list the steps of a run that used a document",
            arguments=Ref("titan_data.cli.data_where:arguments"),
            run=Ref("titan_data.cli.data_where:run"),
            overrides=True,
        ),
        Command(
            name="run rewind",
            group="train",
            summary="go back to an earlier step of a run, and leave out documents from there on",
            arguments=Ref("titan_data.cli.run_rewind:arguments"),
            run=Ref("titan_data.cli.run_rewind:run"),
            overrides=True,
        ),
        Command(
            name="data tokenize",
            group="data and models",
            summary="tokenise a recipe's dataset once and write it to disk",
            arguments=Ref("titan_data.cli.data_tokenize:arguments"),
            run=Ref("titan_data.cli.data_tokenize:run"),
            overrides=True,
        ),
        Command(
            name="data export",
            group="data and models",
            summary="write a tokenised dataset in the format of Megatron-LM",
            arguments=Ref("titan_data.cli.data_export:arguments"),
            run=Ref("titan_data.cli.data_export:run"),
        ),
        Command(
            name="tokenizer download",
            group="data and models",
            summary="download a tokenizer from the Hugging Face hub",
            arguments=Ref("titan_data.cli.tokenizer_download:arguments"),
            run=Ref("titan_data.cli.tokenizer_download:run"),
        ),
        Command(
            name="tokenizer train",
            group="data and models",
            summary="train a BPE tokenizer on a recipe's dataset, or on files",
            arguments=Ref("titan_data.cli.tokenizer_train:arguments"),
            run=Ref("titan_data.cli.tokenizer_train:run"),
            overrides=True,
        ),
        Command(
            name="model download",
            group="data and models",
            summary="download a model from the Hugging Face hub",
            arguments=Ref("titan_data.cli.model_download:arguments"),
            run=Ref("titan_data.cli.model_download:run"),
        ),
    ]
