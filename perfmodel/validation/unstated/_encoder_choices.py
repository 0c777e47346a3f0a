"""Open choices of runs that train a text encoder: sequence length, head, padding."""

from collections.abc import Sequence
from math import log
from typing import Final

from perfmodel.spec import Transformer
from perfmodel.validation.rows import Case
from perfmodel.validation.unstated._choice import OpenChoice, Variant


def _reads_words_both_ways(case: Case) -> bool:
    """Whether a run trains an encoder of text, such as BERT."""
    return (
        isinstance(case.model, Transformer)
        and case.model.head.pooler_and_mlm_head
        and case.job.mode == "train"
    )


_LENGTHS_OF_BERT: Final = ((128, 0.9), (512, 0.1))
"""Tokens per sequence, and the share of BERT's pre-training steps with this length (Devlin et al.,
arXiv 1810.04805, appendix A.2)."""


class EncoderLength(OpenChoice):
    """Tokens per sequence of a text encoder, if unstated: those of BERT's two phases."""

    name = "seq_len"
    tunable = False

    def matters(self, case: Case) -> bool:
        return (
            _reads_words_both_ways(case) and self.name in case.assumed and case.model.seq_len == 512
        )

    def stated(self, case: Case) -> bool:
        return self.name not in case.assumed

    def value(self, case: Case) -> str:
        return str(case.job.seq_len)

    def variants(self, case: Case) -> Sequence[Variant]:
        """Lengths of BERT's two phases, with their shares of the steps."""
        # The two lengths are not a choice of the person who runs it but phases of one training,
        # with known shares of the steps.
        phases = "phases of BERT"
        return [
            Variant(value=str(length), counted_as=phases, share=share, job={"seq_len": length})
            for length, share in _LENGTHS_OF_BERT
        ]

    def usual(self, case: Case) -> str | None:
        return None


_LENGTHS_OF_TASKS: Final = (384,)
"""Tokens per sequence that occur only in fine-tuning to a task: SQuAD's (google-research/bert
run_squad.py, `max_seq_length`, and every port of it), which pre-training never uses. Its code pads
every example to that length (run_squad.py `convert_examples_to_features`; Hugging Face run_qa.py,
`pad_to_max_length`, True by default)."""


class EncoderHead(OpenChoice):
    """The head of an encoder of text: for the word at every token, at masked tokens alone, or for
    labels of a task.

    Code that computes the head of masked tokens alone says so in its framework's entry, and leaves
    nothing open; the length of a task has its labels. No published run states it otherwise, so all
    three are equally likely.
    """

    name = "encoder_head"
    tunable = False

    def matters(self, case: Case) -> bool:
        is_of_task = case.job.seq_len in _LENGTHS_OF_TASKS
        return _reads_words_both_ways(case) and (
            is_of_task or not case.framework.default_job.loss.masked_head
        )

    def stated(self, case: Case) -> bool:
        return not {"head", "masked_head"}.isdisjoint(case.stated)

    def value(self, case: Case) -> str:
        if case.job.loss.head != "vocabulary":
            return "labels"
        return "masked tokens" if case.job.loss.masked_head else "all tokens"

    def variants(self, case: Case) -> Sequence[Variant]:
        labels = Variant(value="labels", job={"head": "token_labels"})
        if case.job.seq_len in _LENGTHS_OF_TASKS:
            return [labels]
        return [
            Variant(value="all tokens"),
            Variant(value="masked tokens", job={"masked_head": True}),
            labels,
        ]

    def usual(self, case: Case) -> str | None:
        return None


_REAL_TOKENS: Final = ((128, 0.83), (512, 0.52))
"""Tokens of a sequence, and the share of them that is text instead of padding, in BERT's
pre-training data, the English Wikipedia and BooksCorpus (Zeng et al., Boosting Distributed Training
Performance of the Unpadded BERT Model, arXiv 2208.08124, section 1)."""


def real_tokens(seq_len: int) -> float:
    """Tokens of text in a sequence of BERT's data: a power law through `_REAL_TOKENS`."""
    (short, most), (long, least) = _REAL_TOKENS
    share = most * (seq_len / short) ** (log(least / most) / log(long / short))
    return seq_len * min(1.0, share)


class Padding(OpenChoice):
    """Whether a text encoder computes the padding of its sequences, batches sequences of similar
    length, or removes padding.

    Compiled steps have fixed shapes, and so compute it. Where a loader is known to sort
    (`Framework.length_bin_tokens`) nothing is open: sequences end half a bin short of what they are
    padded to, on the mean, and those of the shortest pre-training are padded to their stated
    length. So are those of a task.
    """

    name = "padding"
    tunable = False

    def matters(self, case: Case) -> bool:
        return _reads_words_both_ways(case) and case.framework.host.execution != "compiled"

    def stated(self, case: Case) -> bool:
        return not {"mean_tokens", "rms_tokens"}.isdisjoint(case.stated)

    def value(self, case: Case) -> str:
        return "left out" if case.job.varied_lengths else "computed"

    def variants(self, case: Case) -> Sequence[Variant]:
        # A task pads all its examples to one length. Without bins, a loader may compute the
        # padding or leave it out. One that sorts by length pads a sequence to the end of its bin,
        # half a bin further on the mean.
        computed = Variant(value="computed")
        text_tokens = real_tokens(case.job.seq_len)
        seq_len = case.job.seq_len
        if seq_len in _LENGTHS_OF_TASKS:
            return [computed]
        bin_tokens = case.framework.launch.length_bin_tokens
        if not bin_tokens:
            return [computed, Variant(value="left out", job={"mean_tokens": text_tokens})]
        shortest, _ = _LENGTHS_OF_BERT[0]
        if seq_len <= shortest or case.job.loss.head != "vocabulary":
            return [computed]
        padded_tokens = min(seq_len, text_tokens + bin_tokens / 2)
        return [Variant(value="left out", job={"mean_tokens": padded_tokens})]
