"""Text as packed sequences, in an order that depends neither on the mesh nor on where a run was interrupted."""

from recipes.data.chat import TEMPLATES, ChatTemplate, Message, chat_prompt_tokens
from recipes.data.collate import collate
from recipes.data.config import PYTHON_STDLIB, DataConfig, SourceConfig, TokenizerConfig, WeightedSource
from recipes.data.load import SourceReport, TextData, load_dataset
from recipes.data.mixture import Dataset, MixedDataset
from recipes.data.packing import PackedDataset, Sample
from recipes.data.statistics import TextEntropy, text_entropy
from recipes.data.stream import DataStream, evaluation_batches
from recipes.data.text_stream import TextStream
from recipes.data.tokenizer import ByteTokenizer, Tokenizer, check_vocabulary, load_tokenizer, prompt_tokens

__all__ = [
    "PYTHON_STDLIB",
    "TEMPLATES",
    "ByteTokenizer",
    "ChatTemplate",
    "DataConfig",
    "DataStream",
    "Dataset",
    "Message",
    "MixedDataset",
    "PackedDataset",
    "Sample",
    "SourceConfig",
    "SourceReport",
    "TextData",
    "TextEntropy",
    "TextStream",
    "Tokenizer",
    "TokenizerConfig",
    "WeightedSource",
    "chat_prompt_tokens",
    "check_vocabulary",
    "collate",
    "evaluation_batches",
    "load_dataset",
    "load_tokenizer",
    "prompt_tokens",
    "text_entropy",
]
