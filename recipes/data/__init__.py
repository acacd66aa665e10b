"""Text as packed sequences, in an order that depends neither on the mesh nor on where a run was interrupted."""

from recipes.data.config import PYTHON_STDLIB, DataConfig
from recipes.data.documents import Document, read_documents
from recipes.data.load import TextData, load_dataset
from recipes.data.packing import PackedDataset, Sample, collate
from recipes.data.statistics import TextEntropy, text_entropy
from recipes.data.stream import DataStream, evaluation_batches
from recipes.data.tokenizer import ByteTokenizer

__all__ = [
    "PYTHON_STDLIB",
    "ByteTokenizer",
    "DataConfig",
    "DataStream",
    "Document",
    "PackedDataset",
    "Sample",
    "TextData",
    "TextEntropy",
    "collate",
    "evaluation_batches",
    "load_dataset",
    "read_documents",
    "text_entropy",
]
