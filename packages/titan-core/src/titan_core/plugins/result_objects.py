"""Objects that functions of plugins build: the methods that are guarded, and what each of them must return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from titan_core.api import RenderedChat, WeightedTokens
from titan_core.api.data.dataset import DocumentPlace
from titan_core.api.plugins.ref import CodeOrigin
from titan_core.plugins.guarded_object import Check, WrongResult, class_at, guarded_object, shown
from titan_core.plugins.result_values import anything, at_least, instance_of, is_word, list_of, require, scalar, tensors


def _metric_names(origin: CodeOrigin, result: Any) -> Any:
    if not (isinstance(result, tuple) and all(map(is_word, result))):
        raise WrongResult(f"is {shown(result)}; it must be a tuple of names, each a word of letters, digits and _")
    return result


def _document(origin: CodeOrigin, result: Any) -> Any:
    # Sequences of ids are checked where they become tokens. None would end the data.
    if not isinstance(result, str | WeightedTokens | list | tuple) and not hasattr(result, "dtype"):
        raise WrongResult(f"returned {shown(result)}; a document is a str, an array of token ids or WeightedTokens")
    return result


def _marks(origin: CodeOrigin, result: Any) -> Any:
    right = result is None or (isinstance(result, tuple) and len(result) == 2)
    require(right, result, "return the ids before and those after a document's text, or None")
    return result


def _chat_and_prefixes(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], RenderedChat)
    require(right and isinstance(result[1], Iterable), result, "return a RenderedChat, and the texts of its prefixes")
    return result


def _position_of_document(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, tuple) and len(result) == 2 and all(isinstance(one, int) and one >= 0 for one in result)
    require(right, result, "return the logical shard of a document, and its position there")
    return result


def _newest(origin: CodeOrigin, result: Any) -> Any:
    right = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], int) and isinstance(result[1], str)
    require(result is None or right, result, "be the step and the path of a checkpoint, or None")
    return result


def object_of(place: str, *optional: str) -> Check:
    """Return the check for an object of the class at ``place``, which may also be of the ``optional`` ones. Its methods are
    guarded. A protocol is recognised by its members, any other class by ``isinstance``."""

    def check(origin: CodeOrigin, result: Any) -> Any:
        name = place.partition(":")[2]
        require(result is not None, result, f"return the {name} that it builds")
        members = OBJECTS[place]
        if place in CLASSES:
            require(isinstance(result, class_at(place)), result, f"return a {name}")
        more = {member: rule for other in optional for member, rule in OBJECTS[other].items()}
        made = guarded_object(origin, result, members, name, more)
        for member in VALUES.get(place, ()):
            rule = members[member]
            assert rule is not None
            origin.guard(member, partial(getattr, made, member), rule)()
        return made

    return check


_DATASET, _TOKENIZER = "titan_core.api.data.dataset", "titan_core.api.data.tokenizer"
_OBJECTIVE = "titan_core.api.training.batch:ObjectiveFunction"
_FINGERPRINT = f"{_DATASET}:DocumentSource, optional"
_PLACE = f"{_DATASET}:DocumentShard, optional"

OBJECTS: Final[dict[str, dict[str, Check | None]]] = {
    f"{_DATASET}:DocumentSource": {
        "num_documents": at_least(0, none=True),
        "shard": object_of(f"{_DATASET}:DocumentShard", _PLACE),
    },
    f"{_DATASET}:DocumentShard": {
        "__iter__": None, "__next__": _document, "state_dict": instance_of(dict), "load_state_dict": None,
    },
    _FINGERPRINT: {
        "fingerprint": instance_of(Mapping, none=True), "order": instance_of(str, none=True),
        "find": instance_of(DocumentPlace, none=True), "position": _position_of_document,
    },
    _PLACE: {"place": instance_of(DocumentPlace, none=True)},
    f"{_TOKENIZER}:TextTokenizer": {
        "vocab_size": at_least(1), "encode_document": anything, "decode": instance_of(str),
        "marks": _marks, "begin_ids": anything, "end_ids": anything,
        "describe_special_tokens": list_of(str), "tokenizer_files": instance_of(Mapping, none=True),
        "fingerprint": instance_of(str),
    },
    f"{_TOKENIZER}:ChatTokenizer": {
        "encode_with_special_tokens": anything, "require_chat_template": None,
        "render_chat": instance_of(RenderedChat), "render_prefixes": _chat_and_prefixes, "turn_end_ids": anything,
    },
    "titan_core.api.checkpoint.store:CheckpointStore": {
        "restore": instance_of(bool), "after_step": None, "newest": _newest, "before_update": None, "close": None,
    },
    _OBJECTIVE: {
        "__call__": scalar, "of_reference": tensors, "metrics": _metric_names,
    },
    "titan_core.api.parallel.step:StepRunner": {"__call__": scalar, "evaluate": scalar},
    "torch.optim:Optimizer": dict.fromkeys(("step", "zero_grad", "state_dict", "load_state_dict")),
    "titan_core.api.training.optimizer:SkipsOnDevice": {"step_unless": None},
    "torch.optim.lr_scheduler:LRScheduler": dict.fromkeys(("step", "state_dict", "load_state_dict")),
    "contextlib:AbstractContextManager": {"__enter__": None, "__exit__": None},
}  # fmt: skip
"""Class of an object that plugins build (``module:name``) -> its methods and properties, and the checks of their results."""

CLASSES: Final = (
    f"{_TOKENIZER}:TextTokenizer",
    _OBJECTIVE,
    "torch.optim:Optimizer",
    "torch.optim.lr_scheduler:LRScheduler",
)
"""Those that an object must be an instance of."""
VALUES: Final = {
    f"{_DATASET}:DocumentSource": ("num_documents",),
    f"{_TOKENIZER}:TextTokenizer": ("vocab_size",),
    _OBJECTIVE: ("metrics",),
}
"""Properties that are checked once the object is built."""

a_source: Final = object_of(f"{_DATASET}:DocumentSource", _FINGERPRINT)
a_tokenizer: Final = object_of(f"{_TOKENIZER}:TextTokenizer", f"{_TOKENIZER}:ChatTokenizer")
an_objective: Final = object_of(_OBJECTIVE)
